"""Worker methods of benchmarks/serving_gpu.py. Not part of the product.

Fill: the bench connector and vLLM itself zero new pages, and dummy weights make queries of zeros;
either ties every score. So random keys and scales go into the indexer's pages, and every indexer
gets random queries and weights, new ones at every step. Check: every layer of every eager step is
scored densely beside SPIN, and SPIN's choice is compared with the CPU engine's. Switch: one set of
graphs per mode.
"""

import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from bound import policy_of, spread_blocks
from draft_oracle import DraftOracle
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnectorWorker,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.utils import KVBlockZeroer

from spin_kernels.history_update import triton as history_update
from spin_server.engine.spin import indexer_cuda, indexer_function, side_stream
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.indexer_cuda import PAGE_SLOTS, SpinSparseAttnIndexer
from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import StepRows
from spin_server.engine.spin.settings import read_settings
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension

_PAGE_KEYS, _PAGE_BYTES = 64 * 128, 64 * 132
_AHEAD_CYCLES = 4_000_000  # 2 ms at 2 GHz
_SHAPE, _BESIDE = {"b": "blocks", "w": "warps", "p": "programs"}, history_update.BESIDE
_narrow = SpinSparseAttnIndexer.narrow
_plan_ahead, _one_graph = SpinSparseAttnIndexer.plan_ahead, side_stream.one_graph
_learn, _capture_stream = DeviceLayers.learn, CudaGraphManager._capture_stream
_branch, _join = side_stream.SideStream.branch, side_stream.SideStream.join


# vLLM's own indexer, and what it is called with: hidden states, queries, keys and weights.
Score = Callable[[Tensor, Any, Tensor | None, Tensor], Tensor]
Inputs = tuple[Tensor, Any, Tensor | None, Tensor]


class _Bench:
    """What the replaced methods share."""

    mode = "spin"
    rows_each = 1  # of a request
    in_order = False  # whether every row's top-K is sorted, so that two runs can be compared
    words: ClassVar[list[str]] = []  # of the mode
    apart: Any = None  # one more second stream
    graphs: ClassVar[dict[str, Any]] = {}
    bound_blocks: Tensor | None = None
    bound_lengths: Tensor | None = None
    oracle: SpinLayers | None = None
    drafts: DraftOracle | None = None
    rows: StepRows | None = None
    scores: Tensor | None = None
    found: ClassVar[Counter[str]] = Counter()
    events: Any = None
    profiler: Any = None
    listed: ClassVar[dict[str, Tensor]] = {}
    queries: ClassVar[dict[int, Tensor]] = {}  # by layer, (float8): [rows, heads, dim]
    weights: ClassVar[dict[int, Tensor]] = {}  # by layer, (float32): [rows, heads]


def _narrow_in_this_mode(
    self: SpinSparseAttnIndexer,
    score: Score,
    hidden: Tensor,
    q: Any,
    k: Tensor | None,
    weights: Tensor,
) -> Tensor:
    """Run the indexer on random queries, in the mode that is being captured or checked."""
    given = _Bench.queries.get(getattr(self, "layer_number", -1))
    # Not before the benchmark is installed, nor in a batch of vLLM's own.
    if given is not None and len(hidden) <= len(given):
        assert q.shape[1:] == given.shape[1:]
        assert q.dtype == given.dtype
        q = given[: len(q)]
        weights = _Bench.weights[self.layer_number][: len(weights)]
    metadata, inputs = self.decode_metadata(), (hidden, q, k, weights)
    if _Bench.mode == "off" or metadata is None:
        chosen = score(*inputs)
    elif _Bench.mode == "bound":
        chosen = _score_bound(self, metadata, score, inputs)
    elif _Bench.mode == "check" and _Bench.drafts is not None:
        chosen = _narrow(self, score, *inputs)
        _Bench.drafts.check(self, metadata, q, weights, chosen, _Bench.found)
    elif _Bench.mode == "check":
        chosen = _score_checked(self, metadata, score, inputs)
    else:
        chosen = _narrow(self, score, *inputs)
    if _Bench.in_order:
        # vLLM's top-K leaves its order to chance, and the attention adds up in that order.
        rows = self.topk_indices_buffer[: len(hidden), : self.topk_tokens]
        rows.copy_(rows.sort(descending=True).values)
    return chosen


SpinSparseAttnIndexer.narrow = _narrow_in_this_mode


def _one_graph_in_this_mode() -> bool:
    """No second stream where SPIN's work is to lie on the critical path."""
    return _Bench.mode != "in-order" and _one_graph()


def _plan_ahead_in_this_mode(self: SpinSparseAttnIndexer) -> None:
    if _Bench.mode in ("off", "bound"):
        return
    first = self.spin is None or self.layer_number == self.spin.numbers[0]
    if "apart" in _Bench.words and not first:
        with _Bench.apart.branch():
            _plan_ahead(self)
    else:
        _plan_ahead(self)


def _join_in_this_mode(self: side_stream.SideStream) -> None:
    _join(self)
    _join(_Bench.apart)


def _branch_in_this_mode(self: side_stream.SideStream, *held: Tensor, behind: bool = False) -> Any:
    return _branch(self, *held, behind=behind and "at-once" not in _Bench.words)


def _score_bound(
    self: SpinSparseAttnIndexer, metadata: Any, score: Score, inputs: Inputs
) -> Tensor:
    """Score the same evenly spread blocks at every step: the reduction without SPIN's work."""
    step = get_forward_context().additional_kwargs
    decode, rows = metadata.decode, metadata.num_decode_tokens
    assert self.spin is not None
    if self.layer_number == self.spin.numbers[0]:
        lists = self._num_lists(metadata)
        lengths = _Bench.bound_lengths[:rows].view(decode.seq_lens[:lists].shape)
        num_sms = num_compute_units(self.topk_indices_buffer.device.index)
        step["bench_bound"] = {
            "block_table": decode.block_table[:lists].gather(1, _Bench.bound_blocks[:lists]),
            "seq_lens": lengths,
            "schedule_metadata": get_paged_mqa_logits_metadata(lengths, PAGE_SLOTS, num_sms),
        }
    narrowed = dataclasses.replace(decode, **step["bench_bound"])
    with self.seeing(dataclasses.replace(metadata, decode=narrowed)):
        return score(*inputs)


def _score_checked(
    self: SpinSparseAttnIndexer, metadata: Any, score: Score, inputs: Inputs
) -> Tensor:
    (_, q, _, weights) = inputs
    decode, num_rows = metadata.decode, metadata.num_decode_tokens
    spin, found = self.spin, _Bench.found
    assert spin is not None
    assert _Bench.oracle is not None
    assert _Bench.rows is not None
    dense = sparse_attn_indexer.fp8_fp4_paged_mqa_logits(
        (q[:num_rows].reshape(num_rows, 1, *q.shape[1:]), None),
        sparse_attn_indexer.kv_cache_as_quant_view(self.k_cache.kv_cache, self.head_dim, False),
        weights[:num_rows],
        decode.seq_lens[:num_rows],
        decode.block_table,
        decode.schedule_metadata,
        max_model_len=self.max_model_len,
        clean_logits=False,
        indices=decode.indices,
    ).clone()
    chosen = _narrow(self, score, *inputs)
    index = spin.numbers.index(self.layer_number)
    if index == 0:
        _Bench.oracle.begin(_Bench.rows)
    num_slots = decode.seq_lens[:num_rows].reshape(-1).long().cpu()
    rows = _Bench.rows.first(num_rows)
    plan = _Bench.oracle.plan(self.layer_number, rows, num_slots)
    scores = _Bench.scores
    assert scores is not None
    longest = int(plan.lengths.max())
    _Bench.oracle.learn(self.layer_number, scores[:, :longest].float().cpu())
    for row in range(num_rows):
        count = int(spin._plan.counts[index, row])
        blocks = spin._plan.blocks[index, row, :count].long()
        wanted = plan.blocks[row][plan.blocks[row] >= 0]
        found["rows"] += 1
        found["sparse rows"] += count * PAGE_SLOTS < int(num_slots[row])
        if blocks.tolist() != wanted.tolist():
            found["other blocks than the CPU engine"] += 1
        slots = (blocks[:, None] * PAGE_SLOTS + torch.arange(PAGE_SLOTS, device=q.device)).flatten()
        slots = slots[slots < int(num_slots[row])]
        if not torch.equal(dense[row, slots], scores[row, : len(slots)]):
            found["other scores than dense"] += 1
        top = chosen[row, : self.topk_tokens].long()
        top = top[top >= 0]
        best = dense[row, slots].topk(min(self.topk_tokens, len(slots))).values
        if len(top) != len(best) or not torch.equal(dense[row, top].sort(descending=True)[0], best):
            found["other top-K than exact"] += 1
        if not torch.isin(top, slots).all():
            found["top-K outside the blocks"] += 1
    return chosen


class GpuBenchWorker(SpinWorkerExtension):
    """`spin_server`'s worker methods, and the benchmark's."""

    def bench_install(self, in_order: bool = False) -> dict[str, Any]:
        """Route every indexer through the benchmark."""
        _Bench.in_order = in_order
        model = self.model_runner.model
        _Bench.rows_each = 1 + self.model_runner.num_speculative_steps
        rows = self.model_runner.max_num_reqs * _Bench.rows_each
        heads = self.model_config.hf_config.index_n_heads
        for name, module in model.named_modules():
            if isinstance(module, SpinSparseAttnIndexer):  # has a number, unless SPIN is off
                module.layer_number = next(int(p) for p in name.split(".") if p.isdigit())
        indexer_function.put_in_front(self._indexers())  # with SPIN off, nothing else did
        for module in self._indexers():
            shape, device = (rows, heads, module.head_dim), self.device
            queries = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            _Bench.queries[module.layer_number] = queries
            _Bench.weights[module.layer_number] = torch.empty(shape[:2], device=device)
        self.bench_queries(0)
        SpinSparseAttnIndexer.plan_ahead = _plan_ahead_in_this_mode
        _Bench.apart = side_stream.SideStream(self.device)
        side_stream.SideStream.branch = _branch_in_this_mode
        side_stream.SideStream.join = _join_in_this_mode
        indexer_cuda.one_graph = side_stream.one_graph = _one_graph_in_this_mode
        layers = worker_spin().layers
        return {
            "layers": list(layers.numbers) if layers else [],
            "bytes": layers.num_bytes if layers else 0,
            "follows": worker_spin().follows,
        }

    def _indexers(self) -> list[SpinSparseAttnIndexer]:
        modules = self.model_runner.model.modules()
        return [module for module in modules if isinstance(module, SpinSparseAttnIndexer)]

    def bench_queries(self, step: int) -> None:
        """Give every row and layer a query near its own of all steps, as a text would."""
        for layer, queries in _Bench.queries.items():
            random = torch.Generator(device=self.device).manual_seed(layer)
            shape = {"size": queries.shape, "device": self.device}
            lasting = torch.randn(generator=random, **shape)
            # A draft's query is near its request's.
            lasting = lasting[: len(lasting) // _Bench.rows_each]
            lasting = lasting.repeat_interleave(_Bench.rows_each, 0)
            _Bench.weights[layer].uniform_(0.1, 1, generator=random)
            passing = torch.randn(generator=random.manual_seed(1000 * (step + 1) + layer), **shape)
            queries.copy_(0.8 * lasting + 0.6 * passing)

    def bench_fill(self, seed: int) -> int:
        """Write random fp8 keys and scales into every page of every indexer; the pages.

        All other caches are zeroed, the compressor's of tokens that make no whole slot yet among
        them: what a warm-up or a capture left there would find its way into the next key.
        """
        context = self.model_runner.vllm_config.compilation_config.static_forward_context
        with torch.inference_mode():
            for layer in context.values():
                if isinstance(cache := getattr(layer, "kv_cache", None), Tensor):
                    cache.zero_()
        generator = torch.Generator(device="cuda").manual_seed(seed)
        pages = 0
        for module in self._indexers():
            cache = module.k_cache.kv_cache
            flat = cache.as_strided((cache.shape[0], _PAGE_BYTES), (cache.stride(0), 1))
            for start in range(0, len(flat), 4096):
                part = flat[start : start + 4096]
                keys = torch.randn(len(part), _PAGE_KEYS, device="cuda", generator=generator)
                part[:, :_PAGE_KEYS] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
                scales = torch.rand(len(part), 64, device="cuda", generator=generator) + 0.5
                part[:, _PAGE_KEYS:] = scales.view(torch.uint8)
            pages += len(flat)
        return pages

    def bench_check(self) -> None:
        """Compare every step from now on with dense scores and the CPU engine."""
        layers = worker_spin().layers
        assert isinstance(layers, DeviceLayers)
        config = self.model_runner.vllm_config
        settings = read_settings(config)
        _Bench.oracle = SpinLayers(
            layers.numbers,
            layers.options,
            PolicyTable.of(settings),
            num_states=config.scheduler_config.max_num_seqs,
            max_slots=config.model_config.max_model_len // layers.compress_ratio,
            compress_ratio=layers.compress_ratio,
            dense_slots=layers.options.top_k,
        )
        if layers.num_drafts:
            _Bench.drafts = DraftOracle(layers)
            _Bench.mode = "check"
            return
        begin = DeviceLayers.begin

        def noted_begin(
            self: DeviceLayers, rows: StepRows | None, positions: Tensor | None = None
        ) -> None:
            _Bench.rows = rows
            begin(self, rows, positions)

        def noted_learn(self: DeviceLayers, layer: int, scores: Tensor, **how: Any) -> None:
            _Bench.scores = scores
            _learn(self, layer, scores, **how)

        DeviceLayers.begin, DeviceLayers.learn = noted_begin, noted_learn
        _Bench.mode = "check"

    def bench_found(self) -> dict[str, Any]:
        """What the checks found, and SPIN's counters."""
        return {**_Bench.found, "snapshot": worker_spin().snapshot()}

    def bench_hash(self) -> str:
        """Hash the plans of the last step."""
        layers = worker_spin().layers
        assert isinstance(layers, DeviceLayers)
        plan, digest = layers._plan, hashlib.sha256()
        live = (layers._rows.slots >= 0).nonzero()[:, 0].tolist()
        for index in range(len(layers.numbers)):
            for row in live:
                count = int(plan.counts[index, row])
                digest.update(plan.blocks[index, row, :count].cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def bench_topk(self, rows: int) -> str:
        """Hash the slots that the last layer's indexer chose for the batch's first rows."""
        buffer = self._indexers()[0].topk_indices_buffer
        return hashlib.sha256(buffer[:rows].sort().values.cpu().numpy().tobytes()).hexdigest()[:16]

    def bench_keep_pages(self) -> None:
        """Let neither the connector nor vLLM fill a page from now on: both write zeros."""
        DecodeBenchConnectorWorker.start_fill_kv = lambda *_: None
        KVBlockZeroer.zero_block_ids = lambda *_: None

    def bench_listed(self, name: str) -> tuple[float, float | None]:
        """Note the last step's blocks.

        Returns:
            Distinct blocks so far, mean of all rows and layers; and what share of the values in the
            first row's history differ from their neighbours, None without a history.
        """
        layers = worker_spin().layers
        assert isinstance(layers, DeviceLayers)
        plan = layers._plan
        if name not in _Bench.listed:
            _Bench.listed[name] = torch.zeros_like(plan.blocks, dtype=torch.bool)
        live = layers._rows.slots >= 0  # other rows hold an earlier step's plan
        width = plan.blocks.shape[-1]
        listed = torch.arange(width, device="cuda") < (plan.counts * live)[:, :, None]
        layer, row, place = listed.nonzero(as_tuple=True)
        _Bench.listed[name][layer, row, plan.blocks[layer, row, place].long()] = True
        history = layers.histories.vertical[int(layers._rows.slots[live][0])]
        if int(layers.histories.steps[layers._rows.slots[live][0]]) > 0:
            # Neighbours, for bfloat16 has fewer values than a history has slots.
            scored = history[history != 0]
            distinct = float((scored[1:] != scored[:-1]).float().mean())
        else:
            distinct = None
        return float(_Bench.listed[name].sum(-1)[:, live].float().mean()), distinct

    def bench_capture(self, modes: list[str]) -> dict[str, float]:
        """Capture one set of graphs per mode; seconds of each.

        A mode is a word, and after plus signs: `high` for a main stream of high priority, `at-once`
        for planning that need not start behind the top-K, `apart` for planning in a stream of its
        own, `short` for the default `--spin-min-context`; and of the update beside the model, `p16`
        for 16 programs, `w8` for programs of 8 warps, `b32` for tiles of 32 blocks.
        """
        manager, took = self.model_runner.cudagraph_manager, {}
        rows = self.model_runner.max_num_reqs * _Bench.rows_each
        layers = worker_spin().layers
        ratio = layers.compress_ratio if layers is not None else 1
        width = self.model_runner.max_model_len // ratio // PAGE_SLOTS + 1
        _Bench.bound_blocks = torch.zeros(rows, width, dtype=torch.int64, device="cuda")
        _Bench.bound_lengths = torch.ones(rows, 1, dtype=torch.int32, device="cuda")
        dense_slots = layers.dense_slots if layers is not None else 0
        if self.model_runner.speculator is not None:  # its graphs hold nothing of SPIN's
            self.model_runner.speculator.capture = lambda: None
        for mode in modes:
            started = time.perf_counter()
            (_Bench.mode, *_Bench.words), manager.graphs = mode.split("+"), {}
            sizes = {
                _SHAPE[word[0]]: int(word[1:])
                for word in _Bench.words
                if word[0] in _SHAPE and word[1:].isdigit()
            }
            history_update.BESIDE = dataclasses.replace(_BESIDE, **sizes)
            if layers is not None:
                short = SpinSparseAttnIndexer.default_min_slots
                layers.dense_slots = short if "short" in _Bench.words else dense_slots
            high = torch.cuda.Stream(priority=-1)
            CudaGraphManager._capture_stream = (
                (lambda *_, high=high: high) if "high" in _Bench.words else _capture_stream
            )
            self.model_runner.capture_model()
            _Bench.graphs[mode] = manager.graphs
            took[mode] = time.perf_counter() - started
        _Bench.words = []
        if layers is not None:
            layers.dense_slots = dense_slots
        return took

    def bench_events(self) -> list[float]:
        """Device milliseconds of the graphs replayed since the last call; starts the recording."""
        manager = self.model_runner.cudagraph_manager
        if _Bench.events is None:
            _Bench.events, replay = [], manager.run_fullgraph

            def timed(desc: Any) -> Any:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # The launch of a graph takes the host about half a millisecond. A host that runs
                # ahead of the device, as a serving engine's does, hides it; so does this wait.
                torch.cuda._sleep(_AHEAD_CYCLES)
                start.record()
                result = replay(desc)
                end.record()
                _Bench.events.append((start, end))
                return result

            manager.run_fullgraph = timed
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in _Bench.events]
        _Bench.events.clear()
        return times

    def bench_profile(self, on: bool) -> list[tuple[str, int, int, int]]:
        """Start the profiler, or stop it; each kernel's name, stream, start and nanoseconds."""
        if on:
            _Bench.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            _Bench.profiler.start()
            return []
        torch.cuda.synchronize()
        _Bench.profiler.stop()
        return [
            (event.name(), event.device_resource_id(), event.start_ns(), event.duration_ns())
            for event in _Bench.profiler.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]

    def bench_switch(self, mode: str, sparsity: str, exploration: str, tokens: int) -> dict:
        """Replay another mode's graphs; `tokens` is the context that the bound is made for."""
        _Bench.mode = mode
        self.model_runner.cudagraph_manager.graphs = _Bench.graphs[mode]
        table = worker_spin().table
        assert table is not None
        policy = policy_of(sparsity, exploration)
        table.write(0, policy)
        if mode == "bound":
            layers = worker_spin().layers
            slots = tokens // layers.compress_ratio
            listed, length = spread_blocks(slots, policy.sparsity.billionths, layers.options)
            _Bench.bound_blocks.zero_()
            _Bench.bound_blocks[:, : len(listed)] = listed.cuda()
            _Bench.bound_lengths.fill_(length)
        return worker_spin().snapshot()
