"""What happens when something dies or does not load."""

import signal
import threading
import time
import urllib.error
from pathlib import Path

import live_server
import psutil
import pytest


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
def test_killed_process_gives_clients_an_error_and_the_launcher_status_1(
    tiny_model: Path, tmp_path: Path, title: str
) -> None:
    outcome: list[object] = []
    with live_server.running(tiny_model, tmp_path / "log", "--max-model-len", "8192") as server:

        def ask() -> None:
            try:
                outcome.append(server.complete("Hello", max_tokens=8000))
            except (urllib.error.HTTPError, OSError) as error:
                outcome.append(error)

        client = threading.Thread(target=ask)
        client.start()
        time.sleep(2)
        assert client.is_alive(), outcome
        server.engine_process(title).kill()
        client.join(60)
        assert isinstance(outcome[0], urllib.error.HTTPError)
        assert outcome[0].code == 500
        outcome[0].close()
        assert server.process.wait(60) == 1
    assert "the engine died" in (tmp_path / "log").read_text()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=30)[1]


def test_killed_launcher_takes_its_engine_along(tiny_model: Path, tmp_path: Path) -> None:
    with live_server.running(tiny_model, tmp_path / "log", "--max-model-len", "8192") as server:
        engine = psutil.Process(server.process.pid).children(recursive=True)
        assert len(engine) >= 2
        server.process.kill()
        assert not alive(engine)


# One handler takes both signals, so each phase sees one of them.
@pytest.mark.parametrize(
    ("when", "number"),
    [
        (b"", signal.SIGTERM),
        (b"Resolved architecture", signal.SIGINT),
        (b"Initializing a V1 LLM engine", signal.SIGTERM),
        (b"Loading weights", signal.SIGINT),
    ],
)
def test_signal_during_start_stops_everything_with_status_0(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, when: bytes
) -> None:
    server = live_server.start(tiny_model, tmp_path / "log", "--max-model-len", "8192")
    try:
        time.sleep(1.5)  # Python itself is up
        deadline = time.monotonic() + live_server.START_SECONDS
        while when not in server.log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(number)
        assert server.process.wait(30) == 0
        assert not alive(engine)
    finally:
        live_server.stop(server)
    assert "before it was ready" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_requested_stop_is_status_0_though_a_stream_is_open(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with live_server.running(tiny_model, tmp_path / "log", "--max-model-len", "8192") as server:
        body = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with server.open("/v1/completions", body) as response:
            assert response.readline().startswith(b"data: ")
            server.process.send_signal(number)
            assert server.process.wait(30) == 0


BREAK_PLUGIN = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == {plugin!r} and {condition}:
            raise ImportError("blocked by the test")

sys.meta_path.insert(0, Blocker())
"""


# The engine core is spawned with this flag, and so is its worker.
SPAWNED = "'--multiprocessing-fork' in sys.orig_argv"


@pytest.mark.parametrize(
    ("plugin", "condition", "process"),
    [
        ("spin_server.engine.cpu.plugin", "True", "the front end"),
        ("spin_server.engine.cpu.plugin", SPAWNED, "engine"),
        ("spin_server.engine.spin.plugin", SPAWNED, "engine core 0"),
    ],
    ids=["cpu-front-end", "cpu-engine", "spin-engine"],
)
def test_skipped_plugin_stops_the_launcher_with_the_reason(
    tiny_model: Path, tmp_path: Path, plugin: str, condition: str, process: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        BREAK_PLUGIN.format(plugin=plugin, condition=condition)
    )
    server = live_server.start(
        tiny_model, tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)}
    )
    try:
        assert server.process.wait(120) == 3
    finally:
        live_server.stop(server)
    last = [line for line in server.log.read_text().splitlines() if "spin-server:" in line][-1]
    assert process in last
    assert "ready at" not in server.log.read_text()
