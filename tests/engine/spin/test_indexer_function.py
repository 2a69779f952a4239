"""The hook in front of vLLM's indexer function, on a CPU: DeepSeek-V3.2's and GLM-5's attention.

vLLM's own attention method calls the function by its name; DeepGEMM is emulated as in
test_indexer_cuda.py, over Hopper's pages and Blackwell's layout of rows. The layers that attend
are stand-ins that note what they would read of the shared top-K.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_indexer_cuda import BLOCK, DIM, HEADS, HOPPER, DeepGemm, Layout, table
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.models.deepseek_v32 import attention as v32
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
)

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin import indexer_cuda, indexer_function
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.requests import RequestTracker, StepRows
from spin_server.engine.spin.settings import CONFIG_KEY, SpinSettings
from spin_server.engine.spin.worker_state import worker_spin

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="its tensors are a CPU's, for Triton's interpreter; with a GPU Triton compiles",
)

# Layer 1 reuses layer 0's top-K, as in "FSF"; layer 3 is an MTP layer, with an indexer of its own.
SCORING, REUSING, DRAFT = (0, 2), 1, 3
TOP_K, SLOTS, ROWS = 2048, 4608, 4
BLACKWELL_FP8 = Layout(fp4=False, scores=torch.float32, indices=True)
STARTS = (4000, 2600, 2046)  # tokens, and slots; the last sees no more than K at first


class Impl:
    """Stands in for the attention's implementation, which reads the top-K once it is ready."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.read = buffer, torch.empty(0)

    def record_logical_topk_ready(self) -> None:
        self.read = self.buffer.clone()

    def prepare_for_batch(self, _: Any) -> None:
        pass


class Engine:
    """Four attention layers of vLLM's, as far as the indexer goes."""

    def __init__(
        self, layout: Layout, monkeypatch: pytest.MonkeyPatch, *, enabled: bool = True
    ) -> None:
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
        # So that whatever is installed goes with the test.
        self.function = v32.sparse_attn_indexer
        monkeypatch.setattr(v32, "sparse_attn_indexer", self.function)
        options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=4)
        sizes = {
            "num_states": ROWS,
            "max_slots": SLOTS,
            "compress_ratio": 1,
            "dense_slots": TOP_K,
        }
        self.spin = DeviceLayers(
            SCORING, options, table(), num_rows=ROWS, device=torch.device("cpu"), **sizes
        )
        self.host = SpinLayers(SCORING, options, table(), **sizes)
        monkeypatch.setattr(worker_spin(), "layers", self.spin if enabled else None)
        monkeypatch.setattr(worker_spin(), "side", indexer_cuda.SideStream(torch.device("cpu")))
        width = SLOTS // BLOCK
        self.pages = layout.random_pages(ROWS * width, self.random)
        block_table = torch.randperm(ROWS * width, generator=self.random).int()
        self.block_table = block_table.view(ROWS, width)
        self.buffer = torch.full((ROWS, TOP_K), -7, dtype=torch.int32)
        self.weights = torch.rand(ROWS, HEADS, generator=self.random)
        self.model = torch.nn.Module()
        layers = [self.make_attention(n, enabled=enabled) for n in (*SCORING, REUSING, DRAFT)]
        self.layers = sorted(layers, key=lambda layer: layer.layer_name)
        self.model.layers = torch.nn.ModuleList()
        for layer in self.layers:
            self.model.layers.append(torch.nn.Module())
            self.model.layers[-1].self_attn = layer
        indexer_cuda.install(self.model)
        indexer_function.install(self.model)

    def make_attention(self, number: int, *, enabled: bool) -> Any:
        layer = object.__new__(v32.DeepseekV32Attention)
        torch.nn.Module.__init__(layer)
        layer.forward = None  # the projections around the indexer are not made
        name = f"layers.{number}.self_attn"
        for key, value in {
            "indexer": None,
            "skip_topk": False,
            "use_pcp": False,
            "pcp_shard_decode_requests": False,
            "topk_indices_buffer": self.buffer,
            "layer_name": f"{name}.attn",
            "_dense_mha_metadata_layer_name": "" if number == DRAFT else f"{name}.attn",
            "dcp_manager": None,
            "_vllm_config": SimpleNamespace(
                parallel_config=SimpleNamespace(
                    decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
                )
            ),
            "impl": Impl(self.buffer),
            "kv_cache": torch.empty(0),
        }.items():
            setattr(layer, key, value)
        if number == REUSING:
            return layer
        layer.indexer = torch.nn.Module()
        op = object.__new__(indexer_cuda.SpinSparseAttnIndexer)
        torch.nn.Module.__init__(op)
        op.k_cache = SimpleNamespace(prefix=f"{name}.indexer.k_cache", kv_cache=self.pages)
        op.topk_tokens, op.topk_indices_buffer, op.topk_backend = TOP_K, self.buffer, "torch"
        op.spin = self.spin if enabled and number in SCORING else None
        op.layer_number = number
        for key, value in {
            "indexer_op": op,
            "k_cache": op.k_cache,
            "quant_block_size": 128,
            "scale_fmt": "ue8m0",
            "topk_tokens": TOP_K,
            "head_dim": DIM,
            "max_model_len": SLOTS,
            "max_total_seq_len": SLOTS,
        }.items():
            setattr(layer.indexer, key, value)
        return layer

    def metadata(self, num_slots: Tensor) -> Any:
        lengths, rows = num_slots.int()[:, None].contiguous(), len(num_slots)
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
            max_seq_len=SLOTS,
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
            num_decodes=rows,
            num_decode_tokens=rows,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
        )

    def run(self, metadata: Any, rows: int, *, dense_mha: bool = False) -> list[Tensor]:
        """Run every layer on new queries, in order; the queries of each."""
        mla = SimpleNamespace(
            num_actual_tokens=0,  # the attention itself is left out
            num_decode_tokens=0 if dense_mha else rows,
            prefill=SimpleNamespace(use_dense_mha=dense_mha),
        )
        attention: Any = metadata
        if metadata is not None:
            attention = {layer.layer_name: mla for layer in self.layers}
            for layer in self.layers:
                if layer.indexer is not None:
                    attention[layer.indexer.k_cache.prefix] = metadata
        named = {layer.layer_name: layer for layer in self.layers}
        context = ForwardContext(no_compile_layers=named, attn_metadata=attention, slot_mapping={})
        asked = []
        with override_forward_context(context):
            for layer in self.layers:
                hidden, output = torch.zeros(rows, 8), torch.ones(rows, 8)
                asked.append(self.layout.queries(rows, self.random))
                if layer.indexer is not None:
                    self.buffer[:rows] = -1  # as the kernel before it does (fused_norm_rope)
                weights = self.weights[:rows]
                # positions, q_c, q_nope, q_pe, and after the indexer's inputs those of attention
                layer._sparse_indexer_and_attn(
                    hidden, hidden, hidden, hidden, asked[-1], None, weights, *[hidden] * 4, output
                )
                assert not output.any()
        assert context.attn_metadata is attention
        return asked

    def dense(self, metadata: Any, q: Tensor) -> Tensor:
        decode = metadata.decode
        return self.gemm.score(
            (q[:, None], None),
            self.pages,
            self.weights[: len(q)],
            decode.seq_lens,
            decode.block_table,
            decode.seq_lens,
            max_model_len=SLOTS,
            clean_logits=False,
            indices=decode.indices,
        )

    def step(self, rows: StepRows) -> None:
        """Run a decode step with a row of padding, beside the CPU's layers and dense scores."""
        num_rows = len(rows.requests)
        num_slots = torch.cat([rows.positions + 1, torch.zeros(1).long()])
        metadata = self.metadata(num_slots)
        self.spin.begin(rows)
        self.host.begin(rows)
        asked = self.run(metadata, num_rows + 1)
        for layer in self.layers:
            number = self.layers.index(layer)
            chosen, dense = layer.impl.read, self.dense(metadata, asked[number])
            if number == REUSING:
                assert torch.equal(chosen, self.layers[number - 1].impl.read)
                continue
            if number == DRAFT:
                for row in range(num_rows):
                    check_top(chosen[row], dense[row], torch.arange(int(num_slots[row])))
                continue
            plan = self.host.plan(number, rows, num_slots[:num_rows])
            compact = torch.full((num_rows, plan.blocks.shape[1] * BLOCK), torch.nan)
            for row in range(num_rows):
                blocks = plan.blocks[row][plan.blocks[row] >= 0].long()
                slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
                slots = slots[slots < num_slots[row]]
                compact[row, : len(slots)] = dense[row, slots]
                check_top(chosen[row], dense[row], slots)
            assert (chosen[num_rows] == -1).all()
            self.host.learn(number, compact)


def check_top(chosen: Tensor, dense: Tensor, slots: Tensor) -> None:
    """Whether the chosen slots are the best of those given."""
    top = chosen[chosen >= 0].long()
    assert len(top) == len(set(top.tolist())) == min(TOP_K, len(slots))
    assert torch.isin(top, slots).all()
    best = dense[slots].topk(len(top)).values
    assert torch.equal(dense[top].sort(descending=True).values, best)


def requests() -> RequestTracker:
    tracker = RequestTracker(ROWS)
    for number, start in enumerate(STARTS):
        tracker.admit(f"r{number}", policy=1 + number % 3, key=number, num_known_tokens=start)
    return tracker


@pytest.mark.parametrize("layout", [HOPPER, BLACKWELL_FP8], ids=["hopper", "blackwell"])
def test_function_is_narrowed_for_layers_that_score_and_read_by_those_that_reuse(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tracker = Engine(layout, monkeypatch), requests()
    for step in range(5):
        order = [(number + step) % len(STARTS) for number in range(len(STARTS))]
        engine.step(tracker.step([(f"r{n}", STARTS[n] + step, 1) for n in order]))
    assert engine.spin.outcomes.tolist() == engine.host.outcomes.tolist()
    assert engine.host.outcomes[:, :4].min() > 0
    assert torch.equal(engine.spin.histories.vertical, engine.host.state.vertical)
    assert torch.equal(engine.spin.histories.diagonal[:, : SLOTS + 1], engine.host.state.diagonal)


def test_profiling_run_reaches_vllms_function_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(HOPPER, monkeypatch)
    calls: list[tuple[Any, ...]] = []
    installed: Any = v32.sparse_attn_indexer
    monkeypatch.setattr(installed, "function", lambda *a, **k: calls.append((a, k)))
    engine.run(None, ROWS)
    assert [given[1] for given, _ in calls] == [
        f"layers.{number}.self_attn.indexer.k_cache" for number in (*SCORING, DRAFT)
    ]
    assert all(keywords["skip_topk_buffer_clear"] for _, keywords in calls)
    assert not engine.spin.outcomes.any()


def test_step_that_vllm_attends_to_densely_is_not_learnt_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, tracker = Engine(HOPPER, monkeypatch), requests()
    engine.step(tracker.step([("r0", STARTS[0], 1)]))
    before = engine.spin.histories.vertical.clone()
    prompts = tracker.step([("r1", 100, 1)])  # a prompt's tail, which counts as a decode row here
    engine.spin.begin(prompts)
    engine.run(engine.metadata(torch.tensor([101])), 1, dense_mha=True)
    assert indexer_cuda._tap.idle
    assert (engine.layers[0].impl.read[0] == -1).all()  # left as it was, and not remapped
    assert torch.equal(engine.spin.histories.vertical, before)
    engine.step(tracker.step([("r0", STARTS[0] + 1, 1)]))
    assert torch.equal(engine.spin.histories.vertical, engine.host.state.vertical)


def test_prompts_alone_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOPPER, monkeypatch)
    metadata = engine.metadata(torch.tensor([300]))
    metadata.num_decodes = metadata.num_decode_tokens = 0
    metadata.decode = None
    planned: list[Any] = []
    monkeypatch.setattr(engine.spin, "plan", lambda *a, **_: planned.append(a))
    engine.run(metadata, 1)
    assert not planned
    assert indexer_cuda._tap.idle


def test_function_stays_vllms_while_spin_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOPPER, monkeypatch, enabled=False)
    assert v32.sparse_attn_indexer is engine.function
    metadata = engine.metadata(torch.tensor([4000, 30]))
    asked = engine.run(metadata, 2)
    dense = engine.dense(metadata, asked[0])
    check_top(engine.layers[0].impl.read[0], dense[0], torch.arange(4000))


def test_installing_twice_puts_one_hook_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOPPER, monkeypatch)
    indexer_function.install(engine.model)
    assert isinstance(v32.sparse_attn_indexer, indexer_function.IndexerFunction)
    assert v32.sparse_attn_indexer.function is engine.function


@pytest.mark.parametrize(("asked", "slots"), [(None, 32_768), (0, TOP_K), (100_000, 100_000)])
def test_short_contexts_are_counted_in_slots(asked: int | None, slots: int) -> None:
    settings = SpinSettings(min_context=asked)
    assert indexer_cuda.SpinSparseAttnIndexer.dense_slots(settings, TOP_K, 1) == slots


def test_layer_that_vllm_builds_is_ours_and_a_drafts_keeps_no_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the attention's constructor does, with vLLM's own layer and a small configuration."""
    settings = {CONFIG_KEY: SpinSettings(capacity=2).model_dump(mode="json")}
    config = VllmConfig(additional_config=settings)
    hf = {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "index_topk_pattern": "FSF"}
    hf |= {"index_n_heads": HEADS, "index_topk": TOP_K}
    config.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: hf), max_model_len=SLOTS
    )
    for name, value in (("layers", None), ("table", None), ("side", None)):
        monkeypatch.setattr(worker_spin(), name, value)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    buffer = torch.empty(ROWS, TOP_K, dtype=torch.int32)
    built: list[Any] = []
    with set_current_vllm_config(config):
        for number in (*SCORING, DRAFT):
            cache = SimpleNamespace(prefix=f"model.layers.{number}.self_attn.indexer.k_cache")
            sizes = (128, "ue8m0", TOP_K, DIM, SLOTS, SLOTS)
            built.append(sparse_attn_indexer.SparseAttnIndexer(cache, *sizes, buffer))
    assert all(isinstance(layer, indexer_cuda.SpinSparseAttnIndexer) for layer in built)
    assert [layer.layer_number for layer in built] == [0, 2, 3]
    layers = worker_spin().layers
    assert isinstance(layers, DeviceLayers)
    assert [layer.spin for layer in built] == [layers, layers, None]
    assert layers.numbers == SCORING
    assert (layers.compress_ratio, layers.dense_slots) == (1, 32_768)
