"""`spin-server doctor`: what it finds, and what it says to do."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from spin_server.cli.main import main
from spin_server.engine import doctor
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

WORKING = {"is_cpu": True, "max_num_seqs": 128, "device": "cpu", "active": ["spin", "spin_cpu"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "tiny", tiny_config({}), seed=0)
    return tmp_path / "tiny"


@pytest.fixture
def _plugins_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_load_plugins", lambda: WORKING)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_working_installation_has_no_problem(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, str(model), "--max-model-len", "65536", "--max-num-seqs", "128")
    assert (status, "0 problems" in out) == (0, True), out
    assert "ok      plugins: spin, spin_cpu load in a fresh process" in out
    assert "SPIN applies: indexers in 1 layers, 4 index heads" in out
    # 128 requests x 16,384 slots x (4 + 4 bytes, and 8 per block of 64) and a little more.
    assert "SPIN takes 0.02 GiB for 128 requests of 65,536 tokens" in out


@pytest.mark.usefixtures("_plugins_load")
def test_model_without_an_indexer_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    status, out = run(capsys, str(tmp_path))
    assert status == 3
    assert "PROBLEM model: model type 'llama' has no sparse-attention indexer" in out
    assert "1 problem\n" in out


@pytest.mark.usefixtures("_plugins_load")
def test_too_much_history_for_the_memory_is_a_problem(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=4 * 2**30)
    monkeypatch.setattr(doctor.preflight.psutil, "virtual_memory", lambda: memory)
    status, out = run(capsys, str(model), "--max-model-len", "1048576", "--max-num-seqs", "1024")
    assert status == 3
    assert "PROBLEM memory: memory: expected" in out
    assert "2.03 SPIN's histories" in out


def test_gpu_and_its_memory_are_examined(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"is_cpu": False, "max_num_seqs": 1024, "device": "gpu", "active": ["spin"]}
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_name=lambda: "NVIDIA Test",
        get_device_capability=lambda: SimpleNamespace(major=9, minor=0),
        get_device_total_memory=lambda: 4 * 2**30,
    )
    monkeypatch.setattr(doctor, "_load_plugins", lambda: found)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    status, out = run(capsys, str(model), "--max-model-len", "65536", "--max-num-seqs", "64")
    assert "ok      device: NVIDIA Test: Hopper, on which SPIN is measured" in out
    # 64 requests x (16,384 slots x 8 bytes, 256 blocks x 12), and 8 bytes a block of the plans.
    assert "SPIN takes 0.01 GiB for 64 requests of 65,536 tokens; 0.01 GiB of the 3.7" in out
    assert status == 0, out
    status, out = run(capsys, str(model), "--max-model-len", "1048576", "--max-num-seqs", "4096")
    assert (
        "PROBLEM memory: memory: expected SPIN's histories and the weights in less than the 3.7 GiB"
        in out
    )
    assert status == 3


def test_plugin_that_does_not_load_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_load_plugins", lambda: {**WORKING, "active": ["spin"]})
    status, out = run(capsys)
    assert status == 3
    assert "expected spin, spin_cpu to load, but spin_cpu does not; reinstall" in out


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's text."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text.encode())  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other_server(request: pytest.FixtureRequest) -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        text = request.param
        if text in "01":
            text = f'spin_plugin_active{{process="p",plugin="spin"}} 1\nspin_ranks_agree {text}\n'
        server.text = text  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("_plugins_load")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:abc", "http://a b", "x"])
def test_server_that_is_not_there_is_a_problem(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, "--url", url)
    assert status == 3
    assert f"PROBLEM server: {url}: expected a running spin-server" in out


@pytest.mark.usefixtures("_plugins_load")
@pytest.mark.parametrize(
    ("other_server", "message"),
    [
        ("up 1\n", "expected spin_ metrics, got none"),
        ("<html>", "expected a running spin-server"),
        ("spin_plugin_active 1\n", "expected a running spin-server"),
    ],
    indirect=["other_server"],
)
def test_server_of_something_else_is_a_problem(
    other_server: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, "--url", other_server)
    assert status == 3
    assert message in out


@pytest.mark.usefixtures("_plugins_load")
@pytest.mark.parametrize(
    ("other_server", "status", "line"),
    [
        ("1", 0, "ok      server: ranks: every rank chooses alike"),
        ("0", 3, "PROBLEM server: ranks: they differ: serve on one rank or with --spin-off"),
    ],
    indirect=["other_server"],
)
def test_ranks_of_a_running_server_that_differ_are_a_problem(
    other_server: str, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--url", other_server)[0] == status
    assert line in run(capsys, "--url", other_server)[1]


@pytest.mark.usefixtures("_plugins_load")
def test_fewer_cores_than_ranks_are_a_problem_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.preflight.environment, "num_cores", lambda: 3)
    status, out = run(capsys, "--ranks", "4")
    assert status == 3
    assert (
        "PROBLEM ranks: --ranks 4: expected as many cores on this machine, got 3\n1 problem\n"
        in out
    )


@pytest.mark.parametrize(
    ("option", "number", "least"),
    [("--max-num-seqs", "0", 1), ("--ranks", "1", 2), ("--steps", "0", 1)],
)
def test_number_that_makes_no_sense_is_refused(
    option: str, number: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", option, number]) == 2
    assert f"{option}: expected at least {least}, got {number}" in capsys.readouterr().err
