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
from spin_server.engine.spin.worker_state import worker_spin

_SCHEDULE = "spin_schedule"


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
    ) -> DeviceLayers:
        """See `SpinIndexer`."""
        device = self.topk_indices_buffer.device
        return DeviceLayers(
            geometry.layers,
            options,
            worker_spin().policy_table(settings, device),
            num_states=num_places(settings, num_requests),
            num_rows=num_requests,
            max_slots=max_slots,
            compress_ratio=geometry.compress_ratio,
            device=device,
        )

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
        spin = self.spin
        assert isinstance(spin, DeviceLayers)
        step = get_forward_context().additional_kwargs
        decode, num_rows = metadata.decode, metadata.num_decode_tokens
        if self.layer_number == spin.numbers[0]:
            lengths = spin.plan(decode.seq_lens[:num_rows].reshape(-1))
            num_sms = num_compute_units(self.topk_indices_buffer.device.index)
            step[_SCHEDULE] = lengths, get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, num_sms)
        lengths, schedule = step[_SCHEDULE]
        narrowed = dataclasses.replace(
            decode,
            block_table=spin.table(self.layer_number, decode.block_table[:num_rows]),
            seq_lens=lengths,
            schedule_metadata=schedule,
        )
        with self.seeing(dataclasses.replace(metadata, decode=narrowed)):
            chosen = super().forward_cuda(hidden_states, q_quant, k, weights)
        spin.remap(self.layer_number, self.topk_indices_buffer[:num_rows, : self.topk_tokens])
        spin.learn(self.layer_number, _tap.take()[:num_rows])
        return chosen
