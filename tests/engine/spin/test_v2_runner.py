"""Whose requests vLLM's V2 runner tells of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu_worker import Worker

from spin_server.engine.spin import indexer_cuda, v2_runner
from spin_server.engine.spin.worker_state import WorkerSpin


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> WorkerSpin:
    found = WorkerSpin()
    found.layers = SimpleNamespace(num_states=2, num_drafts=0, numbers=(1, 4))  # type: ignore[assignment]
    monkeypatch.setattr(v2_runner, "worker_spin", lambda: found)
    monkeypatch.setattr(indexer_cuda, "worker_spin", lambda: found)
    return found


def new_request(name: str) -> Any:
    return SimpleNamespace(
        req_id=name,
        prefill_token_ids=None,
        prompt_token_ids=[1, 2, 3],
        prompt_len=3,
        sampling_params=None,
    )


def test_warm_up_is_told_by_its_time_and_not_by_a_name_that_a_client_may_give(
    worker: WorkerSpin, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = object.__new__(v2_runner.SpinModelState)
    state.rope_state = state.prompt_embeds_state = None

    def warm_up(_: Any) -> str:
        state.add_request(0, new_request("_warmup_0_"))
        state.add_request(1, new_request("anything"))
        return "warm"

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(
        model_states, "resolve_model_state_cls", model_states.resolve_model_state_cls
    )
    v2_runner.install()
    assert Worker.compile_or_warm_up_model(object()) == "warm"
    assert not any(worker.requests().knows(name) for name in ("_warmup_0_", "anything"))
    state.add_request(0, new_request("_warmup_0_"))
    assert worker.requests().knows("_warmup_0_")


def test_warm_up_that_fails_does_not_last(
    worker: WorkerSpin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm_up(_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(
        model_states, "resolve_model_state_cls", model_states.resolve_model_state_cls
    )
    v2_runner.install()
    with pytest.raises(MemoryError):
        Worker.compile_or_warm_up_model(object())
    assert not worker.warming


@pytest.mark.usefixtures("worker")
def test_model_whose_indexers_are_not_ours_does_not_start() -> None:
    with pytest.raises(RuntimeError, match=r"in front of layers \(1, 4\), got \(\)"):
        indexer_cuda.install(torch.nn.Identity())
