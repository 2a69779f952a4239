"""Follow the requests of vLLM's V1 model runner, which CPU engines use.

Rows move by swap and condense between steps, so a row is known by its request's id. Source:
vllm/v1/worker/gpu_model_runner.py (_update_states, _model_forward).
"""

from typing import Any

from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.recorder import Recorder
from spin_server.engine.spin.requests import RequestTracker, StepRows
from spin_server.engine.spin.settings import request_identity
from spin_server.engine.spin.worker_state import worker_spin

STEP_ROWS = "spin_step_rows"


def install() -> None:
    """Patch the runner's class, once per process."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update_states, model_forward = GPUModelRunner._update_states, GPUModelRunner._model_forward

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        if worker_spin().layers is None:  # SPIN is off
            return result
        _follow(worker_spin().requests(), scheduler_output, self.requests, worker_spin().recorder)
        self.spin_scheduled = scheduler_output.num_scheduled_tokens
        return result

    def _model_forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        layers = worker_spin().layers
        if isinstance(layers, SpinLayers):
            get_forward_context().additional_kwargs[STEP_ROWS] = _step(self, layers)
        return model_forward(self, *arguments, **keywords)

    worker_spin().follows = True
    GPUModelRunner._update_states = _update_states
    GPUModelRunner._model_forward = _model_forward


def _follow(
    tracker: RequestTracker, scheduler_output: Any, requests: Any, recorder: Recorder | None
) -> None:
    for request in scheduler_output.finished_req_ids:
        tracker.finish(request)
        if recorder is not None:
            recorder.finish(request)
    for request in scheduler_output.preempted_req_ids or ():
        tracker.preempt(request)
    for new in scheduler_output.scheduled_new_reqs:
        policy, key = request_identity(new.req_id, new.sampling_params)
        tracker.admit(new.req_id, policy=policy, key=key, num_known_tokens=new.prompt_len)
    for request in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
        tracker.resume(request, requests[request].num_tokens)


def _step(runner: Any, layers: SpinLayers) -> StepRows:
    batch = runner.input_batch
    computed, scheduled = batch.num_computed_tokens_cpu, runner.spin_scheduled
    rows = (
        worker_spin()
        .requests()
        .step(
            [
                (request, int(computed[row]), scheduled[request])
                for row, request in enumerate(batch.req_ids)
            ]
        )
    )
    # Before any layer: vLLM skips the indexer while the longest context has at most K slots.
    layers.begin(rows)
    return rows
