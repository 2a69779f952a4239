"""vLLM's sparse-attention indexer on a GPU, scoring the blocks that SPIN chose.

Importing this registers the class with vLLM. Decode rows get a compact block table, compact lengths
and schedule metadata built from those; vLLM's own scoring and top-K kernels run on them. Source:
vllm/model_executor/layers/sparse_attn_indexer.py (sparse_attn_indexer, forward_cuda).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.device_drafts import DraftedLayers, device_class
from spin_server.engine.spin.indexer import PAGE_SLOTS, SpinIndexer
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.spin.side_stream import SideStream, one_graph
from spin_server.engine.spin.worker_state import worker_spin

_PLANNED = "spin_planned"  # whether layers are planned, in vLLM's forward context
_STEPS = "spin_steps"  # what the planned layers score, in vLLM's forward context


class _ScoreTap:
    """Stands in for vLLM's scoring function, and hands on what it returns, once."""

    def __init__(self) -> None:
        self._function = sparse_attn_indexer.fp8_fp4_paged_mqa_logits
        self._then: Callable[[Tensor], None] | None = None
        sparse_attn_indexer.fp8_fp4_paged_mqa_logits = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        scores: Tensor = self._function(*arguments, **keywords)
        then, self._then = self._then, None
        if then is not None:
            then(scores)
        return scores

    @property
    def idle(self) -> bool:
        """Whether nobody waits for scores."""
        return self._then is None

    def then(self, use: Callable[[Tensor], None]) -> None:
        """Use the next scores as soon as they are launched, before vLLM's top-K is."""
        self._then = use

    def forget(self) -> None:
        """Use no scores, for none were made."""
        self._then = None


_tap = _ScoreTap()


@dataclass(frozen=True, slots=True)
class _Step:
    """What a layer scores in a step.

    Args:
        lengths: (int32): [rows, 1], or [requests, rows of each]; slots that each row scores.
        schedule: DeepGEMM's, made of the lengths.
    """

    lengths: Tensor
    schedule: Tensor


@SparseAttnIndexer.register_oot
class SpinSparseAttnIndexer(SpinIndexer):
    """The indexer of one layer, with SPIN in front."""

    # Below, there is less to save than it takes (docs/gpu.md, "Short contexts").
    default_min_slots = 32_768
    # The layer to plan beside this one's top-K; in a tuple, or PyTorch makes it a part of this one.
    following: tuple[Self, ...] = ()
    _unlearnt: Tensor | None = None  # scores, until the layer's attention is launched

    def make_layers(
        self,
        settings: SpinSettings,
        numbers: tuple[int, ...],
        options: SpinOptions,
        num_requests: int,
        num_drafts: int,
        sizes: dict[str, int],
    ) -> DeviceLayers:
        """See `SpinIndexer`."""
        device = self.topk_indices_buffer.device
        worker = worker_spin()
        worker.side = SideStream(device)
        return device_class(num_drafts)(
            numbers,
            options,
            worker.policy_table(settings, device),
            num_rows=num_requests,
            device=device,
            num_drafts=num_drafts,
            **sizes,
        )

    def plan(self, metadata: Any, *, alone: bool) -> None:
        """Plan this layer alone, or all layers in order."""
        spin, decode = self._layers(), metadata.decode
        options: dict[str, Any] = {}
        if alone:
            options = {"first": spin.numbers.index(self.layer_number), "count": 1}
        if isinstance(spin, DraftedLayers):
            options["beside"] = alone
            if not decode.decode_is_uniform:
                options["row_counts"] = decode.per_req_decode_lens
        spin.plan(
            decode.seq_lens.reshape(-1)[: metadata.num_decode_tokens],
            decode.block_table[: self._num_lists(metadata)],
            num_requests=metadata.num_decodes,
            **options,
        )

    def scheduled(self, metadata: Any) -> _Step:
        """Get what this layer scores; the layers share it where they score as many slots."""
        spin, steps = self._layers(), get_forward_context().additional_kwargs
        key = (_STEPS, 0 if spin.shared_lengths else self.layer_number)
        if key not in steps:
            decode, num_rows = metadata.decode, metadata.num_decode_tokens
            shape = decode.seq_lens[: self._num_lists(metadata)].shape
            lengths = spin.lengths(self.layer_number, shape)
            # On Blackwell every row names its block table's row; ours has a row for each, too.
            indices = None if decode.indices is None else decode.indices[:num_rows]
            num_sms = num_compute_units(self.topk_indices_buffer.device.index)
            schedule = get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, num_sms, indices=indices)
            steps[key] = _Step(lengths, schedule)
        step: _Step = steps[key]
        return step

    @staticmethod
    def _num_lists(metadata: Any) -> int:
        """Count the rows of the block table: one of each request, or of each of its rows.

        vLLM hands DeepGEMM a request's rows together where it takes as many, and flattens them
        otherwise. Source: DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
        (vllm/v1/attention/backends/mla/indexer.py).
        """
        together = metadata.decode.seq_lens.shape[-1] > 1
        return int(metadata.num_decodes if together else metadata.num_decode_tokens)

    def plan_ahead(self) -> None:
        """Plan this layer alone, where the step is one graph."""
        metadata = self.decode_metadata()
        if metadata is not None and one_graph():
            self.plan(metadata, alone=True)
            self.scheduled(metadata)
            get_forward_context().additional_kwargs[_PLANNED] = True

    def forward_cuda(
        self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Score and select as vLLM does, decode rows over the blocks that SPIN chose.

        Returns:
            (int32): [tokens, k]; the chosen slots of each token, -1 filled.
        """
        return self.narrow(super().forward_cuda, hidden_states, q_quant, k, weights)

    def narrow(
        self,
        score: Callable[[Tensor, Any, Tensor | None, Tensor], Tensor],
        hidden_states: Tensor,
        q_quant: Any,
        k: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        """See `forward_cuda`.

        Args:
            score: vLLM's own indexer, in whichever way the model calls it.
            hidden_states, q_quant, k, weights: what it is called with.
        """
        metadata = self.decode_metadata()
        if metadata is None:
            return score(hidden_states, q_quant, k, weights)
        spin, beside, context = self._layers(), worker_spin().beside, get_forward_context()
        decode, num_rows = metadata.decode, metadata.num_decode_tokens
        beside.join()
        if _PLANNED not in context.additional_kwargs:
            self.plan(metadata, alone=False)
            context.additional_kwargs[_PLANNED] = True
        step = self.scheduled(metadata)
        tables = decode.block_table[: self._num_lists(metadata)]
        narrowed = dataclasses.replace(
            decode,
            block_table=spin.table(self.layer_number, tables),
            seq_lens=step.lengths,
            schedule_metadata=step.schedule,
        )

        def use(scores: Tensor) -> None:
            if not one_graph():
                spin.learn(self.layer_number, scores[:num_rows])
                return
            self._unlearnt = scores[:num_rows]
            # Beside vLLM's top-K, and behind it: a GPU full of our programs would delay it.
            with beside.branch(behind=True):
                for following in self.following:
                    following.plan_ahead()

        _tap.then(use)
        with self.seeing(dataclasses.replace(metadata, decode=narrowed)):
            chosen = score(hidden_states, q_quant, k, weights)
        if not _tap.idle:  # vLLM needs no top-K in this step, and has left the last one's
            _tap.forget()
            return chosen
        spin.remap(self.layer_number, self.topk_indices_buffer[:num_rows, : self.topk_tokens])
        return chosen

    def learn_beside(self) -> None:
        """Fold what this layer scored into its history, beside the small kernels that follow.

        Called once the layer's attention is launched, which needs the whole GPU. Behind it most
        kernels use a few multiprocessors each, and little of the memory's speed (docs/log.md).
        """
        scores, self._unlearnt = self._unlearnt, None
        if scores is not None:
            with worker_spin().beside.branch(scores):
                self._layers().learn(self.layer_number, scores, beside=True)

    def _layers(self) -> DeviceLayers:
        assert isinstance(self.spin, DeviceLayers)
        return self.spin


def install(model: Any) -> None:
    """Plan every layer ahead, the first beside the layer before it; learn behind the attention."""
    modules = dict(model.named_modules())
    found = {name: m for name, m in modules.items() if isinstance(m, SpinSparseAttnIndexer)}
    names = sorted((n for n, m in found.items() if m.spin), key=lambda n: found[n].layer_number)
    indexers = [found[name] for name in names]
    spin = worker_spin().layers
    wanted = () if spin is None else spin.numbers  # none: SPIN is off
    if (attached := tuple(indexer.layer_number for indexer in indexers)) != wanted:
        raise RuntimeError(f"expected SPIN in front of layers {wanted}, got {attached}")
    if not indexers:
        return

    def begin(*_: Any) -> None:
        with worker_spin().beside.branch():
            indexers[0].plan_ahead()

    # A graph that starts with two branches seems to start the second late (docs/log.md).
    layers, number = _layer_of(names[0])
    modules.get(f"{layers}.{number - 1}", model).register_forward_pre_hook(begin)
    for indexer, following in pairwise(indexers):
        indexer.following = (following,)
    for name, indexer in zip(names, indexers, strict=True):
        layers, number = _layer_of(name)
        attention = name.removeprefix(f"{layers}.{number}.").partition(".")[0]
        modules[f"{layers}.{number}.{attention}"].register_forward_hook(
            lambda *_, indexer=indexer: indexer.learn_beside()
        )
    model.register_forward_hook(lambda *_: worker_spin().beside.join())


def _layer_of(name: str) -> tuple[str, int]:
    """Split a module's name at its decoder layer: the name of all layers, and the number."""
    path = name.split(".")
    place = next(index for index, part in enumerate(path) if part.isdigit())
    return ".".join(path[:place]), int(path[place])
