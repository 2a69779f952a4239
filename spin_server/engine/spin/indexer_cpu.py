"""vLLM's sparse-attention indexer on a CPU, scoring the blocks that SPIN chose.

Importing this registers the class with vLLM. Decode rows get a compact block table and compact
lengths; vLLM's own scoring and top-K kernels run on those, and the indices that come back are
mapped to the request's slots. Prefill rows are untouched. Source:
vllm/model_executor/layers/sparse_attn_indexer.py (SparseAttnIndexer.forward_cpu).
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm import _custom_ops
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from spin_kernels.slot_remap import slot_remap
from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.indexer import PAGE_SLOTS, SpinIndexer
from spin_server.engine.spin.layers import LayerPlan, SpinLayers
from spin_server.engine.spin.recorder import Recorder
from spin_server.engine.spin.requests import StepRows
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.spin.v1_runner import STEP_ROWS
from spin_server.engine.spin.worker_state import worker_spin


def narrow(decode: Any, plan: LayerPlan) -> Any:
    """Narrow a decode batch to the listed blocks.

    Args:
        decode: vLLM's decode metadata; its block table is [rows, pages].
        plan: the listed blocks; each row's newest block comes last.

    Returns:
        The metadata with a compact block table, [rows, width], and compact lengths, in slots.
    """
    table = decode.block_table[: len(plan.blocks)].gather(1, plan.blocks.clamp(min=0).long())
    lengths = plan.lengths.to(decode.seq_lens.dtype)
    return dataclasses.replace(decode, block_table=table, seq_lens=lengths)


class _ScoreTap:
    """Stands in for vLLM's scoring op during one call of the indexer, and keeps its results."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        self._op = op
        self.scores: Tensor | None = None

    def __call__(self, *arguments: Any) -> Tensor:
        self.scores = self._op(*arguments)
        return self.scores


class _Overhead:
    """Times SPIN's own work in one layer call, between the pauses."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop counting: vLLM's kernels run."""
        self._seconds += time.perf_counter() - self._since

    def go_on(self) -> None:
        """Count again."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Add the call to the worker's sum."""
        self.pause()
        worker = worker_spin()
        worker.overhead_seconds += self._seconds
        worker.overhead_calls += 1


@SparseAttnIndexer.register_oot
class SpinSparseAttnIndexer(SpinIndexer):
    """The indexer of one layer, with SPIN in front."""

    def make_layers(
        self,
        settings: SpinSettings,
        numbers: tuple[int, ...],
        options: SpinOptions,
        num_requests: int,
        num_drafts: int,
        sizes: dict[str, int],
    ) -> SpinLayers:
        """See `SpinIndexer`; makes the recorder too."""
        assert not num_drafts  # refused before
        worker = worker_spin()
        # Every rank chooses alike, so one of them records.
        if settings.record is not None and get_tensor_model_parallel_rank() == 0:
            worker.recorder = Recorder(settings.record, numbers)
        return SpinLayers(
            numbers,
            options,
            worker.policy_table(settings),
            **sizes,
        )

    def forward_cpu(
        self, hidden_states: Tensor, q_quant: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Score and select as vLLM does, decode rows over the blocks that SPIN chose.

        Returns:
            (int32): [tokens, k]; the chosen slots of each token, -1 filled.
        """
        metadata = self.decode_metadata()
        rows = get_forward_context().additional_kwargs.get(STEP_ROWS)
        if metadata is None or rows is None:
            chosen: Tensor = super().forward_cpu(hidden_states, q_quant, k, weights)
            return chosen
        assert isinstance(self.spin, SpinLayers)
        return self._forward_sparse(self.spin, metadata, rows, hidden_states, q_quant, k, weights)

    def _forward_sparse(
        self,
        spin: SpinLayers,
        metadata: Any,
        rows: StepRows,
        hidden_states: Tensor,
        q_quant: Tensor,
        k: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        num_rows, decode = metadata.num_decode_tokens, metadata.decode
        clock = _Overhead()
        seq_lens = decode.seq_lens[:, -1] if decode.seq_lens.ndim == 2 else decode.seq_lens
        num_slots = seq_lens[:num_rows].long()
        plan = spin.plan(self.layer_number, rows, num_slots)
        narrowed = dataclasses.replace(
            metadata,
            max_seq_len=max(1, int(plan.lengths.max())),
            decode=narrow(decode, plan),
        )
        clock.pause()
        tap = _ScoreTap(_custom_ops.fp8_paged_mqa_logits_cpu)
        _custom_ops.fp8_paged_mqa_logits_cpu = tap
        try:
            with self.seeing(narrowed):
                chosen: Tensor = super().forward_cpu(hidden_states, q_quant, k, weights)
        finally:
            _custom_ops.fp8_paged_mqa_logits_cpu = tap._op
        clock.go_on()
        slot_remap(chosen[:num_rows, : self.topk_tokens], plan.blocks, block_size=PAGE_SLOTS)
        assert tap.scores is not None  # decode rows are scored last
        spin.learn(self.layer_number, tap.scores)
        clock.stop()
        recorder = worker_spin().recorder
        if recorder is not None:
            self._record(recorder, spin, plan, rows, decode, num_slots, q_quant, weights)
        return chosen

    def _record(
        self,
        recorder: Recorder,
        spin: SpinLayers,
        plan: LayerPlan,
        rows: StepRows,
        decode: Any,
        num_slots: Tensor,
        q_quant: Tensor,
        weights: Tensor,
    ) -> None:
        """Score the wanted rows densely, for the record alone."""
        for row, fresh in zip(plan.active.tolist(), plan.fresh.tolist(), strict=True):
            request = rows.requests[row]
            if not recorder.wants(request, self.layer_number):
                continue
            one = slice(row, row + 1)
            scores = _custom_ops.fp8_paged_mqa_logits_cpu(
                q_quant[one],
                self.k_cache.kv_cache.view(self.k_cache.kv_cache.shape[0], -1),
                weights[one],
                num_slots[one].to(decode.seq_lens.dtype),
                decode.block_table[one].contiguous(),
                PAGE_SLOTS,
                int(num_slots[row]),
            )
            recorder.add(
                request,
                self.layer_number,
                key=int(rows.keys[row]),
                policy=int(rows.policies[row]),
                query_position=int(rows.positions[row]) // spin.compress_ratio,
                turn_start=fresh,
                scores=scores[0],
                blocks=plan.blocks[row],
            )
