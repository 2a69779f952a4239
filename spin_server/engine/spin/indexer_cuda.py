"""vLLM's sparse-attention indexer on a GPU, scoring the blocks that SPIN chose.

Importing this registers the class with vLLM. Decode rows get a compact block table, compact lengths
and schedule metadata built from those; vLLM's own scoring and top-K kernels run on them. Source:
vllm/model_executor/layers/sparse_attn_indexer.py (sparse_attn_indexer, forward_cuda).
"""

import dataclasses
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.model_support import IndexerGeometry
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.indexer import PAGE_SLOTS, SpinIndexer
from spin_server.engine.spin.settings import SpinSettings, num_places
from spin_server.engine.spin.side_stream import SideStream, one_graph
from spin_server.engine.spin.worker_state import worker_spin

_PLAN = "spin_plan"  # the step's, in vLLM's forward context


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
class SpinSparseAttnIndexer(SpinIndexer):
    """The indexer of one layer, with SPIN in front."""

    def make_layers(
        self,
        settings: SpinSettings,
        geometry: IndexerGeometry,
        options: SpinOptions,
        *,
        num_requests: int,
        max_slots: int,
        dense_slots: int,
    ) -> DeviceLayers:
        """See `SpinIndexer`."""
        device = self.topk_indices_buffer.device
        worker = worker_spin()
        worker.side = SideStream(device)
        return DeviceLayers(
            geometry.layers,
            options,
            worker.policy_table(settings, device),
            num_states=num_places(settings, num_requests),
            num_rows=num_requests,
            max_slots=max_slots,
            compress_ratio=geometry.compress_ratio,
            dense_slots=dense_slots,
            device=device,
        )

    def plan(self, metadata: Any) -> tuple[Tensor, Tensor]:
        """Plan the step for every layer: compact lengths, and the schedule made of them."""
        assert isinstance(self.spin, DeviceLayers)
        decode, num_rows = metadata.decode, metadata.num_decode_tokens
        lengths = self.spin.plan(
            decode.seq_lens[:num_rows].reshape(-1), decode.block_table[:num_rows]
        )
        # On Blackwell every row names its block table's row; ours has a row for each, too.
        indices = None if decode.indices is None else decode.indices[:num_rows]
        num_sms = num_compute_units(self.topk_indices_buffer.device.index)
        schedule = get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, num_sms, indices=indices)
        return lengths, schedule

    def plan_ahead(self) -> None:
        """Plan beside the layers before the first indexer, where the step is one graph.

        Called for the first layer with an indexer, before the model's forward.
        """
        metadata = self.decode_metadata()
        if metadata is not None and one_graph():
            with worker_spin().beside.branch():
                get_forward_context().additional_kwargs[_PLAN] = self.plan(metadata)

    def forward_cuda(
        self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Score and select as vLLM does, decode rows over the blocks that SPIN chose.

        Returns:
            (int32): [tokens, k]; the chosen slots of each token, -1 filled.
        """
        metadata = self.decode_metadata()
        if metadata is None:
            chosen: Tensor = super().forward_cuda(hidden_states, q_quant, k, weights)
            return chosen
        spin, beside = self.spin, worker_spin().beside
        assert isinstance(spin, DeviceLayers)
        step = get_forward_context().additional_kwargs
        decode, num_rows = metadata.decode, metadata.num_decode_tokens
        beside.join()
        if _PLAN not in step:
            step[_PLAN] = self.plan(metadata)
        lengths, schedule = step[_PLAN]
        narrowed = dataclasses.replace(
            decode,
            block_table=spin.table(self.layer_number, decode.block_table[:num_rows]),
            seq_lens=lengths,
            schedule_metadata=schedule,
        )
        with self.seeing(dataclasses.replace(metadata, decode=narrowed)):
            chosen = super().forward_cuda(hidden_states, q_quant, k, weights)
        spin.remap(self.layer_number, self.topk_indices_buffer[:num_rows, : self.topk_tokens])
        scores = _tap.take()
        with beside.branch(scores):
            spin.learn(self.layer_number, scores[:num_rows])
        return chosen


def install(model: Any) -> None:
    """Plan ahead of a model's forward, and let nothing outlive it."""
    indexers = [m for m in model.modules() if isinstance(m, SpinSparseAttnIndexer) and m.spin]
    if not indexers:  # SPIN is off
        return
    first = min(indexers, key=lambda indexer: indexer.layer_number)
    model.register_forward_pre_hook(lambda *_: first.plan_ahead())
    model.register_forward_hook(lambda *_: worker_spin().beside.join())
