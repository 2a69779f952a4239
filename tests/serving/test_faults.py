"""What happens when something dies or does not load."""

import threading
import time
import urllib.error
from pathlib import Path

import live_server
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


def test_requested_stop_is_status_0(tiny_model: Path, tmp_path: Path) -> None:
    with live_server.running(tiny_model, tmp_path / "log", "--max-model-len", "8192") as server:
        assert live_server.stop(server) == 0


BREAK_PLUGIN = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "spin_server.engine.cpu.plugin" and {condition}:
            raise ImportError("blocked by the test")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    ("condition", "process"),
    [
        ("True", "the front end"),
        # The engine core is spawned with this flag, and so is its worker.
        ("'--multiprocessing-fork' in sys.orig_argv", "engine"),
    ],
    ids=["front-end", "engine"],
)
def test_skipped_plugin_stops_the_launcher_with_the_reason(
    tiny_model: Path, tmp_path: Path, condition: str, process: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAK_PLUGIN.format(condition=condition))
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
