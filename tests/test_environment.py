"""What the operator has set is kept."""

import os

import pytest

from spin_server import environment


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "other,spin_cpu"),  # unset means every plugin: none may be shut out
        ("", "spin_cpu"),
        ("mine", "mine,spin_cpu"),
        ("spin_cpu,mine", "spin_cpu,mine"),
    ],
)
def test_our_plugins_are_added_to_the_operators(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if before is not None:
        monkeypatch.setenv("VLLM_PLUGINS", before)
    environment.allow_plugins(["spin_cpu"], ["other", "spin_cpu"])
    assert os.environ["VLLM_PLUGINS"] == after


def test_listeners_stay_on_loopback_and_nothing_is_reported_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VLLM_HOST_IP", "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    environment.prepare_engine()
    environment.prepare_cpu_engine()
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_operators_threads_and_address_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    environment.prepare_cpu_engine()
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
