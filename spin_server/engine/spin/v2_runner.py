"""Follow the requests of vLLM's V2 model runner, which CUDA engines use.

A model state hears of every request that comes and goes, and of every step before it is launched
or replayed. Source: vllm/v1/worker/gpu/model_states (interface.py, default.py) and
vllm/v1/worker/gpu/model_runner.py (add_requests, _remove_request, execute_model).
"""

from typing import Any

from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_worker import Worker

from spin_server.engine.spin import indexer_cuda, indexer_function
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.device_drafts import DraftedLayers
from spin_server.engine.spin.settings import request_identity
from spin_server.engine.spin.worker_state import worker_spin


class SpinModelState(DefaultModelState):  # type: ignore[misc]
    """vLLM's own state, and SPIN's rows before every step."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        indexer_cuda.install(self.model)
        indexer_function.install(self.model)
        layers = worker_spin().layers
        if isinstance(layers, DeviceLayers):
            layers.warm_up()
        worker_spin().follows = True

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Note a request that is new, or comes back after a preemption."""
        super().add_request(req_index, new_req_data)
        if worker_spin().layers is None:  # SPIN is off
            return
        if worker_spin().warming:
            return  # unknown to the tracker, its steps are nobody's, and nothing counts them
        policy, key = request_identity(new_req_data.req_id, new_req_data.sampling_params)
        known = new_req_data.prefill_token_ids or new_req_data.prompt_token_ids or ()
        worker_spin().requests().admit(
            new_req_data.req_id,
            policy=policy,
            key=key,
            num_known_tokens=len(known),
            resumed=len(known) > new_req_data.prompt_len,
        )

    def remove_request(self, req_id: str) -> None:
        """Note a request that ended, was aborted or is preempted."""
        super().remove_request(req_id)
        if worker_spin().layers is not None:
            worker_spin().requests().finish(req_id)

    def prepare_attn(self, input_batch: Any, *arguments: Any, **keywords: Any) -> Any:
        """Stage the step's rows; a capture or a dummy batch has none."""
        layers = worker_spin().layers
        if isinstance(layers, DeviceLayers):
            tracker = worker_spin().requests()
            # Nobody's: vLLM's dummy batches and those of its warm-up, and none of another kind.
            known = all(tracker.knows(request) for request in input_batch.req_ids)
            positions = None
            if layers.num_drafts:  # the host does not know yet what was rejected
                starts = input_batch.query_start_loc[: input_batch.num_reqs]
                positions = input_batch.positions[starts]
            layers.begin(tracker.step(_rows(input_batch)) if known else None, positions)
        metadata = super().prepare_attn(input_batch, *arguments, **keywords)
        if isinstance(layers, DraftedLayers):
            num_decodes = _num_decodes(metadata)
            if num_decodes is not None:
                layers.note_unscored(num_decodes)
        return metadata

    def postprocess_state(
        self, idx_mapping: Any, num_sampled: Any, *arguments: Any, **keywords: Any
    ) -> None:
        """Tell how many of the step's drafts were accepted."""
        super().postprocess_state(idx_mapping, num_sampled, *arguments, **keywords)
        layers = worker_spin().layers
        if isinstance(layers, DraftedLayers):
            layers.judge(num_sampled)


def _num_decodes(attn_metadata: dict[str, Any]) -> int | None:
    """Count the requests that vLLM's indexer scores as decode rows.

    None of the layers has an indexer where vLLM captures the draft model's graphs. Source:
    vllm/v1/worker/gpu/spec_decode/target_dependent_ar/cudagraph_utils.py (create_forward_fn).
    """
    for metadata in attn_metadata.values():
        if isinstance(metadata, DeepseekV32IndexerMetadata):
            return int(metadata.num_decodes)
    return None


def _rows(input_batch: Any) -> list[tuple[str, int, int]]:
    """Request, position of its first token, number of its tokens: in batch order."""
    return list(
        zip(
            input_batch.req_ids,
            input_batch.num_computed_tokens_np.tolist(),
            input_batch.num_scheduled_tokens.tolist(),
            strict=True,
        )
    )


def install() -> None:
    """Give models without a state of their own ours, once per process, and mark the warm-up.

    The requests of vLLM's warm-up are told by when they come: a client may give its request any id.
    Source: vllm/v1/worker/gpu_worker.py (compile_or_warm_up_model).
    """
    warm_up = Worker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        worker_spin().warming = True
        try:
            return warm_up(self)
        finally:
            worker_spin().warming = False

    Worker.compile_or_warm_up_model = compile_or_warm_up_model
    resolve = model_states.resolve_model_state_cls

    def resolve_model_state_cls(*arguments: Any, **keywords: Any) -> Any:
        found = resolve(*arguments, **keywords)
        return SpinModelState if found is DefaultModelState else found

    model_states.resolve_model_state_cls = resolve_model_state_cls
