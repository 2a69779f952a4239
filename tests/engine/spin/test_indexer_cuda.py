"""The CUDA hook around vLLM's own indexer function, on a CPU.

DeepGEMM's scoring is emulated in torch, over the pages of Hopper (FP8 keys, float32 scores) and of
Blackwell (MXFP4 keys, rows that name their table's row, bfloat16 scores); vLLM's code around it and
its reference top-K are the real ones, and SPIN's kernels run in Triton's interpreter. The emulation
stands in for hardware: it shows what SPIN hands over and takes back, not how DeepGEMM computes.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_deepgemm import BLACKWELL, BLOCK, DIM, HEADS, HOPPER, DeepGemm, Layout
from torch import Tensor
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
)

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin import indexer_cuda
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import RequestTracker, StepRows
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its tensors are a CPU's, for Triton's interpreter; with a GPU Triton compiles",
)

LAYERS, TOP_K = (2, 5), 512
SLOTS, ROWS, RATIO = 1280, 6, 4


class Attention(torch.nn.Module):
    """Runs an indexer on the inputs of its layer."""

    def __init__(self, indexer: Any, events: list[str]) -> None:
        super().__init__()
        self.indexer, self.events = indexer, events

    def forward(self, *inputs: Any) -> Tensor:
        chosen: Tensor = self.indexer.forward_cuda(*inputs)
        self.events.append(f"attention {self.indexer.layer_number}")
        return chosen.clone()  # all layers choose into one buffer


class Model(torch.nn.Module):
    """Layers with an indexer and one before them without, named as in vLLM's models."""

    def __init__(self, indexers: list[Any], events: list[str]) -> None:
        super().__init__()
        self.events = events
        before = indexers[0].layer_number - 1
        self.layers = torch.nn.ModuleDict({str(before): torch.nn.Identity()})
        for indexer in indexers:
            layer = torch.nn.Module()
            layer.attn = Attention(indexer, events)
            self.layers[str(indexer.layer_number)] = layer

    def forward(self, inputs: list[tuple[Any, ...]]) -> list[Tensor]:
        self.events.append("start")
        first, *layers = self.layers.values()
        first(None)
        return [layer.attn(*given) for layer, given in zip(layers, inputs, strict=True)]


class Engine:
    """Two layers of the hook, and what vLLM would hand them."""

    def __init__(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout, self.gemm = layout, DeepGemm(layout)
        self.random = torch.Generator().manual_seed(1)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(indexer_cuda, "num_compute_units", lambda _: 132)
        monkeypatch.setattr(indexer_cuda, "get_paged_mqa_logits_metadata", self.gemm.schedule)
        monkeypatch.setattr(indexer_cuda._tap, "_function", self.gemm.score)
        monkeypatch.setattr(
            sparse_attn_indexer,
            "current_platform",
            SimpleNamespace(is_xpu=lambda: False, fp8_dtype=lambda: torch.float8_e4m3fn),
        )
        options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=4)
        sizes = {
            "num_states": ROWS,
            "max_slots": SLOTS,
            "compress_ratio": RATIO,
            "dense_slots": TOP_K,
        }
        self.spin = DeviceLayers(
            LAYERS, options, table(), num_rows=ROWS, device=torch.device("cpu"), **sizes
        )
        self.host = SpinLayers(LAYERS, options, table(), **sizes)
        monkeypatch.setattr(worker_spin(), "layers", self.spin)
        monkeypatch.setattr(worker_spin(), "side", indexer_cuda.SideStream(torch.device("cpu")))
        width = SLOTS // BLOCK
        self.pages = [layout.random_pages(ROWS * width, self.random) for _ in LAYERS]
        self.block_table = torch.randperm(ROWS * width, generator=self.random).int()
        self.block_table = self.block_table.view(ROWS, width)
        self.buffer = torch.full((ROWS, TOP_K), -7, dtype=torch.int32)
        self.layers = [self.make_layer(index) for index in range(len(LAYERS))]
        self.events: list[str] = []
        self.model = Model(self.layers, self.events)
        indexer_cuda.install(self.model)
        self.weights = torch.rand(ROWS, HEADS, generator=self.random)

    def make_layer(self, index: int) -> Any:
        layer = object.__new__(indexer_cuda.SpinSparseAttnIndexer)
        torch.nn.Module.__init__(layer)
        for name, value in {
            "spin": self.spin,
            "layer_number": LAYERS[index],
            "k_cache": SimpleNamespace(prefix=f"layers.{index}", kv_cache=self.pages[index]),
            "quant_block_size": 128,
            "scale_fmt": "ue8m0",
            "topk_tokens": TOP_K,
            "head_dim": DIM,
            "max_model_len": SLOTS,
            "max_total_seq_len": SLOTS,
            "topk_indices_buffer": self.buffer,
            "skip_k_cache_insert": True,
            "use_pcp": False,
            "pcp_shard_decode_requests": False,
            "dense_mha_metadata_layer_name": "",
            "use_fp4_cache": self.layout.fp4,
            "dcp_rank": 0,
            "dcp_world_size": 1,
            "_cp_kv_cache_interleave_size": 1,
            "candidate_blocks": None,
            "candidate_block_size": 0,
            "candidate_write": False,
            "topk_backend": "torch",
        }.items():
            setattr(layer, name, value)
        return layer

    def metadata(self, num_slots: Tensor) -> Any:
        lengths = num_slots.int()[:, None].contiguous()
        rows = len(lengths)
        indices = torch.arange(rows, dtype=torch.int32) if self.layout.indices else None
        decode = DeepSeekV32IndexerDecodeMetadata(
            block_table=self.block_table[:rows],
            seq_lens=lengths,
            decode_lens=torch.ones(rows, dtype=torch.int32),
            requires_padding=False,
            schedule_metadata=lengths.clone(),
            indices=indices,
        )
        return DeepseekV32IndexerMetadata(
            seq_lens=num_slots,
            max_seq_len=SLOTS * RATIO,
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
            num_decodes=rows,
            num_decode_tokens=rows,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
        )

    def step(self, rows: StepRows, padding: int = 1) -> None:
        """Run a step of all layers, and compare it with the CPU engine's and with dense scores."""
        num_rows = len(rows.requests)
        num_slots = torch.cat([(rows.positions + 1) // RATIO, torch.zeros(padding).long()])
        metadata = self.metadata(num_slots)
        attention = {layer.k_cache.prefix: metadata for layer in self.layers}
        context = ForwardContext(no_compile_layers={}, attn_metadata=attention, slot_mapping={})
        self.spin.begin(rows)
        self.host.begin(rows)
        inputs = self.inputs(len(num_slots))
        with override_forward_context(context):
            found = self.model(inputs)
        assert context.attn_metadata is attention
        for index, (_, q, _, weights) in enumerate(inputs):
            chosen = found[index]
            dense = self.dense(index, metadata, q, weights)
            plan = self.host.plan(LAYERS[index], rows, num_slots[:num_rows])
            compact = torch.full((num_rows, plan.blocks.shape[1] * BLOCK), torch.nan)
            for row in range(num_rows):
                self.check_row(
                    index, row, int(num_slots[row]), dense[row], chosen[row], plan, compact
                )
            assert (chosen[num_rows:] == -1).all()
            self.host.learn(LAYERS[index], compact)

    def inputs(self, num_rows: int) -> list[tuple[Any, ...]]:
        """Hidden states, queries, keys and weights of each layer."""
        hidden, weights = torch.zeros(num_rows, 8), self.weights[:num_rows]
        return [(hidden, self.layout.queries(num_rows, self.random), None, weights) for _ in LAYERS]

    def dense(self, index: int, metadata: Any, q: Any, weights: Tensor) -> Tensor:
        decode = metadata.decode
        values, scales = q if isinstance(q, tuple) else (q, None)
        return self.gemm.score(
            (values[:, None], scales[:, None] if scales is not None else None),
            self.pages[index],
            weights,
            decode.seq_lens,
            decode.block_table,
            decode.seq_lens,
            max_model_len=SLOTS,
            clean_logits=False,
            indices=decode.indices,
        )

    def check_row(
        self,
        index: int,
        row: int,
        num_slots: int,
        dense: Tensor,
        chosen: Tensor,
        plan: Any,
        compact: Tensor,
    ) -> None:
        count = int(self.spin._plan.counts[index, row])
        blocks = self.spin._plan.blocks[index, row, :count]
        assert blocks.tolist() == plan.blocks[row][plan.blocks[row] >= 0].tolist()
        slots = (blocks.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        slots = slots[slots < num_slots]
        compact[row, : len(slots)] = dense[slots].float()
        top = chosen[chosen >= 0].long()
        assert len(top) == len(set(top.tolist())) == min(TOP_K, len(slots))
        assert torch.isin(top, slots).all()
        if not dense[slots].isnan().any():
            best = dense[slots].float().topk(len(top)).values
            assert torch.equal(dense[top].float().sort(descending=True).values, best)


def table() -> PolicyTable:
    policies = PolicyTable(4, Policy())
    for index, policy in enumerate(
        (
            Policy(sparsity=Ratio.parse("s", "0.5"), exploration=Ratio.parse("e", "0.3")),
            Policy(sparsity=Ratio.parse("s", "0.65"), exploration_policy="block_age"),
            Policy(sparsity=Ratio.parse("s", "0")),
        ),
        start=1,
    ):
        policies.write(index, policy)
    return policies


STARTS = (4000, 2600, 3333, 4601, 2030)  # tokens; the last sees no more than K slots at first


def decode(engine: Engine, steps: int) -> None:
    tracker = RequestTracker(ROWS)
    for number, start in enumerate(STARTS):
        tracker.admit(f"r{number}", policy=number % 4, key=number * 977, num_known_tokens=start)
    for step in range(steps):
        order = [(number + step) % len(STARTS) for number in range(len(STARTS))]
        engine.step(tracker.step([(f"r{n}", STARTS[n] + step, 1) for n in order]))


@pytest.mark.parametrize("ahead", [False, True], ids=["in-order", "ahead"])
@pytest.mark.parametrize("layout", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_hook_chooses_scores_selects_and_learns_as_on_a_cpu(
    layout: Layout, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(layout, monkeypatch)
    monkeypatch.setattr(indexer_cuda, "one_graph", lambda: ahead)
    plan, learn = engine.spin.plan, engine.spin.learn

    def noted_plan(*arguments: Any, **keywords: Any) -> None:
        engine.events.append(f"plan {keywords['first']}" if "first" in keywords else "plan all")
        plan(*arguments, **keywords)

    def noted_learn(layer: int, scores: Tensor, *, beside: bool = False) -> None:
        engine.events.append(f"learn {layer} beside" if beside else f"learn {layer}")
        learn(layer, scores, beside=beside)

    monkeypatch.setattr(engine.spin, "plan", noted_plan)
    monkeypatch.setattr(engine.spin, "learn", noted_learn)
    decode(engine, 5)
    wanted = (
        "start, plan 0, plan 1, attention 2, learn 2 beside, attention 5, learn 5 beside"
        if ahead
        else "start, plan all, learn 2, attention 2, learn 5, attention 5"
    )
    assert engine.events == wanted.split(", ") * 5
    assert engine.spin.outcomes.tolist() == engine.host.outcomes.tolist()
    assert engine.host.outcomes[:, :4].min() > 0
    assert torch.equal(engine.spin.histories.vertical, engine.host.state.vertical)
    assert torch.equal(engine.spin.histories.diagonal, engine.host.state.diagonal)


@pytest.mark.parametrize(("asked", "slots"), [(None, 131_072 // 4), (0, 512), (100_000, 25_000)])
def test_short_contexts_are_dense_on_a_gpu_unless_asked_otherwise(
    asked: int | None, slots: int
) -> None:
    settings = SpinSettings(min_context=asked)
    assert indexer_cuda.SpinSparseAttnIndexer.dense_slots(settings, TOP_K, RATIO) == slots


def test_capture_with_lengths_of_zero_asks_for_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BLACKWELL, monkeypatch)
    engine.spin.begin(None)
    metadata = engine.metadata(torch.zeros(ROWS, dtype=torch.int64))
    attention = {layer.k_cache.prefix: metadata for layer in engine.layers}
    context = ForwardContext(no_compile_layers={}, attn_metadata=attention, slot_mapping={})
    with override_forward_context(context):
        found = engine.model(engine.inputs(ROWS))
    assert all((chosen == -1).all() for chosen in found)
    assert not engine.spin.histories.vertical.any()
    assert not engine.spin.outcomes.any()


def test_score_that_is_no_number_leaves_history_and_indices_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(HOPPER, monkeypatch)
    engine.gemm.spoiled = torch.arange(0, ROWS * SLOTS // BLOCK, 7)
    decode(engine, 4)
    assert engine.spin.histories.vertical.isfinite().all()
    assert engine.spin.histories.diagonal.isfinite().all()
    assert torch.equal(engine.spin.histories.vertical, engine.host.state.vertical)
    assert engine.spin.histories.vertical.any()
