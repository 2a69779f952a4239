"""vLLM's sparse-attention indexer on a GPU, scoring the blocks that SPIN chose.

Importing this registers the class with vLLM. Decode rows get a compact block table, compact lengths
and schedule metadata built from those; vLLM's own scoring and top-K kernels run on them. Source:
vllm/model_executor/layers/sparse_attn_indexer.py (sparse_attn_indexer, forward_cuda).
"""

import dataclasses
from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.model_support import indexer_geometry
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.settings import num_places, read_settings
from spin_server.engine.spin.worker_state import worker_spin

PAGE_SLOTS = 64


class _ScoreTap:
    """Stands in for vLLM's scoring function, and keeps what it returned last."""

    def __init__(self) -> None:
        self._function = sparse_attn_indexer.fp8_fp4_paged_mqa_logits
        self.scores: Tensor | None = None
        sparse_attn_indexer.fp8_fp4_paged_mqa_logits = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        self.scores = self._function(*arguments, **keywords)
        return self.scores

    def take(self) -> Tensor:
        """Hand the scores over, and hold on to them no longer."""
        assert self.scores is not None  # decode rows are always scored
        scores, self.scores = self.scores, None
        return scores


_tap = _ScoreTap()


@SparseAttnIndexer.register_oot
class SpinSparseAttnIndexer(SparseAttnIndexer):  # type: ignore[misc]
    """The indexer of one layer, with SPIN in front."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        vllm_config = get_current_vllm_config()
        settings = read_settings(vllm_config)
        self.spin: DeviceLayers | None = None
        if not settings.enabled:
            return
        worker = worker_spin()
        if worker.layers is None:
            geometry = indexer_geometry(vllm_config.model_config.hf_config.to_dict())
            device = self.topk_indices_buffer.device
            num_requests = vllm_config.scheduler_config.max_num_seqs
            worker.layers = DeviceLayers(
                geometry.layers,
                SpinOptions(block_size=PAGE_SLOTS, top_k=self.topk_tokens, seed=settings.seed),
                worker.policy_table(settings, device),
                num_states=num_places(settings, num_requests),
                num_rows=num_requests,
                max_slots=vllm_config.model_config.max_model_len // geometry.compress_ratio,
                compress_ratio=geometry.compress_ratio,
                device=device,
            )
        assert isinstance(worker.layers, DeviceLayers)
        self.spin = worker.layers
        self.layer_number = extract_layer_index(self.k_cache.prefix)
        if self.layer_number == self.spin.numbers[0]:
            _first.append(self)
        self.num_sms = num_compute_units(self.topk_indices_buffer.device.index)

    def forward_cuda(
        self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Score and select as vLLM does, decode rows over the blocks that SPIN chose.

        Returns:
            (int32): [tokens, k]; the chosen slots of each token, -1 filled.
        """
        context = get_forward_context()
        metadata = (
            context.attn_metadata[self.k_cache.prefix]
            if isinstance(context.attn_metadata, dict)
            else None
        )
        spin = self.spin
        if spin is None or metadata is None or not metadata.num_decodes:
            chosen: Tensor = super().forward_cuda(hidden_states, q_quant, k, weights)
            return chosen
        decode, num_rows = metadata.decode, metadata.num_decode_tokens
        if self.layer_number == spin.numbers[0]:
            if _SCHEDULE in context.additional_kwargs:
                spin.join()
            else:
                context.additional_kwargs[_SCHEDULE] = self.plan(spin, metadata)
        lengths, schedule = context.additional_kwargs[_SCHEDULE]
        narrowed = dataclasses.replace(
            metadata,
            decode=dataclasses.replace(
                decode,
                block_table=spin.table(self.layer_number, decode.block_table[:num_rows]),
                seq_lens=lengths,
                schedule_metadata=schedule,
            ),
        )
        original = context.attn_metadata
        context.attn_metadata = {**original, self.k_cache.prefix: narrowed}
        try:
            chosen = super().forward_cuda(hidden_states, q_quant, k, weights)
        finally:
            context.attn_metadata = original
        spin.remap(self.layer_number, self.topk_indices_buffer[:num_rows, : self.topk_tokens])
        spin.learn(self.layer_number, _tap.take()[:num_rows])
        return chosen

    def plan(self, spin: DeviceLayers, metadata: Any) -> tuple[Tensor, Tensor]:
        """Plan the step for every layer; the compact lengths, and the schedule made of them."""
        seq_lens = metadata.decode.seq_lens[: metadata.num_decode_tokens]
        lengths = spin.plan(seq_lens.reshape(-1))
        return lengths, get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, self.num_sms)


def plan_ahead(*_: Any) -> None:
    """Plan beside the first layers, which have no indexer; runs before the model's forward.

    Only where the step is one graph: elsewhere a graph may end between the fork and the join.
    """
    context = get_forward_context()
    if not _first or not isinstance(context.attn_metadata, dict):
        return
    layer = _first[0]
    metadata = context.attn_metadata.get(layer.k_cache.prefix)
    spin = layer.spin
    assert spin is not None
    spin.beside = spin.may_run_beside and context.cudagraph_runtime_mode == CUDAGraphMode.FULL
    if spin.beside and metadata is not None and metadata.num_decodes:
        with spin.aside():
            context.additional_kwargs[_SCHEDULE] = layer.plan(spin, metadata)


def join(*_: Any) -> None:
    """Let nothing outlive the model's forward."""
    if _first and _first[0].spin is not None:
        _first[0].spin.join()
        _first[0].spin.beside = False


_first: list[SpinSparseAttnIndexer] = []  # the layer that plans the step


_SCHEDULE = "spin_schedule"
