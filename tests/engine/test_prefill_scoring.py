"""Scores by matrix multiplication equal the definition, and agree with vLLM's CPU operator."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spin_server.engine.cpu import prefill_scoring
from spin_server.engine.cpu.prefill_scoring import paged_mqa_logits_gemm

HEAD_SIZE = 128
TOP_K = 512
FP8_NAN = 0x7F
# What float32 sums may lose, as a share of the sum of the terms' magnitudes.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The arguments of the operator."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    seq_lens: Tensor
    page_table: Tensor
    block_size: int
    max_seq_len: int

    def score(self, scorer: Callable[..., Tensor] = paged_mqa_logits_gemm) -> Tensor:
        return scorer(
            self.q,
            self.kv_cache,
            self.weights,
            self.seq_lens,
            self.page_table,
            self.block_size,
            self.max_seq_len,
        )

    @property
    def seen(self) -> Tensor:
        """[rows, max_seq_len], true where a score is defined."""
        return torch.arange(self.max_seq_len) < self.seq_lens[:, None]


def causal(num_rows: int, num_slots: int, compress_ratio: int = 4) -> list[int]:
    """Return the lengths of the newest rows of a request, of which the last sees num_slots."""
    newest = num_slots * compress_ratio
    return [max(0, newest - num_rows + row + 1) // compress_ratio for row in range(num_rows)]


def make_inputs(
    requests: list[list[int]],
    num_heads: int,
    *,
    block_size: int = 64,
    page_gap: int = 0,
    shared_pages: int = 0,
    seed: int = 0,
) -> Inputs:
    """Build a pool where every byte that no row sees is NaN.

    Args:
        requests: the lengths of each request's rows.
        num_heads: heads of the indexer.
        block_size: slots per page.
        page_gap: bytes of other caches between two pages.
        shared_pages: leading pages that all requests have in common.
        seed: of every draw.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    longest = [max(lens, default=0) for lens in requests]
    columns = -(-max(longest) // block_size) + 2  # two that nobody needs
    table = torch.randperm(len(requests) * columns + 3, generator=generator)[3:].int()
    table = table.view(len(requests), columns)
    table[:, :shared_pages] = table[0, :shared_pages]

    key_bytes, scale_bytes = block_size * HEAD_SIZE, block_size * 4
    pool = torch.empty(table.numel() + 3, key_bytes + scale_bytes + page_gap, dtype=torch.uint8)
    kv_cache = pool.fill_(FP8_NAN)[:, : key_bytes + scale_bytes]
    kv_cache[:, key_bytes:] = 0xFF  # float32 NaN
    for pages, slots in zip(table.long(), longest, strict=True):
        for page, start in zip(pages, range(0, slots, block_size), strict=False):
            n = min(block_size, slots - start)
            keys = (normal(n, HEAD_SIZE) * 60).to(torch.float8_e4m3fn)
            kv_cache[page, : n * HEAD_SIZE] = keys.view(torch.uint8).flatten()
            scales = torch.rand(n, generator=generator) * 0.02 + 0.001
            kv_cache[page, key_bytes : key_bytes + n * 4] = scales.view(torch.uint8)

    num_rows = sum(map(len, requests))
    owner = torch.arange(len(requests)).repeat_interleave(torch.tensor([*map(len, requests)]))
    return Inputs(
        q=(normal(num_rows, num_heads, HEAD_SIZE) * 60).to(torch.float8_e4m3fn),
        kv_cache=kv_cache,
        weights=normal(num_rows, num_heads) * 0.01,
        seq_lens=torch.tensor([n for lens in requests for n in lens], dtype=torch.int32),
        page_table=table[owner],
        block_size=block_size,
        max_seq_len=max(longest),
    )


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the scores [rows, max_seq_len] by definition, row by row, and the tolerated errors."""
    scores = torch.zeros(len(inputs.q), inputs.max_seq_len)
    magnitudes = torch.zeros_like(scores)
    key_bytes = inputs.block_size * HEAD_SIZE
    scale_bytes = inputs.block_size * 4
    for row, query in enumerate(inputs.q.float()):
        seen = min(int(inputs.seq_lens[row]), inputs.max_seq_len)
        pages = inputs.page_table[row, : -(-seen // inputs.block_size)].long()
        raw = inputs.kv_cache[pages]
        keys = raw[:, :key_bytes].reshape(-1, HEAD_SIZE).view(torch.float8_e4m3fn).float()[:seen]
        scale = raw[:, key_bytes : key_bytes + scale_bytes].flatten().view(torch.float32)[:seen]
        weights = inputs.weights[row]
        scores[row, :seen] = scale * ((keys @ query.T).relu() @ weights)
        magnitudes[row, :seen] = scale * ((keys.abs() @ query.abs().T) @ weights.abs())
    return scores, magnitudes * ROUNDING


def assert_equal_scores(got: Tensor, inputs: Inputs) -> None:
    expected, tolerated = reference(inputs)
    seen = inputs.seen
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    # A NaN fails too: it is not <= anything.
    assert ((got - expected).abs() <= tolerated)[seen].all()


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_slots"),
    [
        (1, 1, 1),
        (3, 5, 63),
        (7, 3, 65),
        (37, 4, 129),
        (130, 4, 200),  # more rows than a tile has
        (5, 64, 2_049),  # one slot past a tile
        (9, 64, 513),
        (3, 2, 4_100),
    ],
    ids=lambda n: str(n),
)
def test_scores_equal_definition(num_rows: int, num_heads: int, num_slots: int) -> None:
    inputs = make_inputs([causal(num_rows, num_slots)], num_heads)
    assert_equal_scores(inputs.score(), inputs)


@pytest.mark.parametrize(
    ("block_size", "num_slots"), [(1, 9), (16, 131), (64, 700), (256, 300)], ids=lambda n: str(n)
)
def test_scores_equal_definition_across_tiles_and_panels(
    block_size: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small limits, so that each loop runs several times and ends on a rest.
    monkeypatch.setattr(prefill_scoring, "PANEL_SLOTS", 192)
    monkeypatch.setattr(prefill_scoring, "TILE_SLOTS", 50)
    monkeypatch.setattr(prefill_scoring, "PRODUCT_NUMEL", 50 * 4 * 3)
    inputs = make_inputs([causal(11, num_slots)], 4, block_size=block_size)
    assert_equal_scores(inputs.score(), inputs)


def test_scores_equal_definition_for_a_late_panel() -> None:
    inputs = make_inputs([causal(2, prefill_scoring.PANEL_SLOTS + 70)], 2)
    assert_equal_scores(inputs.score(), inputs)


@pytest.mark.parametrize("shared_pages", [0, 2])
def test_scores_equal_definition_for_several_requests(shared_pages: int) -> None:
    lens = [causal(9, 200), [0, 0, 0], [300], causal(40, 150), [0, *causal(5, 260)], [140, 141]]
    inputs = make_inputs(lens, 4, shared_pages=shared_pages)
    assert_equal_scores(inputs.score(), inputs)


def test_scores_equal_definition_for_lengths_in_any_order() -> None:
    inputs = make_inputs([[5, 130, 0, 77, 64, 1, 129, 0]], 3)
    assert_equal_scores(inputs.score(), inputs)


@pytest.mark.parametrize("page_gap", [4, 576 * 64])
def test_scores_equal_definition_with_pages_beside_other_caches(page_gap: int) -> None:
    inputs = make_inputs([causal(9, 333), causal(4, 64)], 4, page_gap=page_gap)
    assert inputs.kv_cache.stride(0) == 64 * 132 + page_gap
    assert_equal_scores(inputs.score(), inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_scores_equal_definition_for_pages_beyond_two_gibibytes(dtype: torch.dtype) -> None:
    near = make_inputs([causal(5, 150)], 2)
    stride = 2**29 + 4
    # 2.5 GiB of addresses, of which only the pages that are written take memory.
    far = torch.empty(stride * 5 + near.kv_cache.shape[1], dtype=torch.uint8)
    far = far.as_strided((6, near.kv_cache.shape[1]), (stride, 1))
    used = near.page_table[0, :3].long()
    moved = torch.tensor([5, 2, 4], dtype=dtype)
    far[moved.long()] = near.kv_cache[used]
    inputs = replace(
        near,
        kv_cache=far,
        page_table=moved.expand(5, 3).contiguous(),
        seq_lens=near.seq_lens.to(dtype),
    )
    assert torch.equal(inputs.score()[near.seen], near.score()[near.seen])


def test_page_table_entries_past_the_lengths_are_not_read() -> None:
    inputs = make_inputs([causal(40, 200), causal(3, 64)], 2)
    for row, length in enumerate(inputs.seq_lens.tolist()):
        inputs.page_table[row, -(-length // 64) :] = 1 << 30
    assert_equal_scores(inputs.score(), inputs)


def test_slots_past_max_seq_len_are_not_scored() -> None:
    whole = make_inputs([causal(9, 200)], 2)
    cut = replace(whole, max_seq_len=100)
    assert_equal_scores(cut.score(), cut)


def test_arguments_are_left_alone() -> None:
    inputs = make_inputs([causal(9, 200)], 2)
    before = replace(inputs, seq_lens=inputs.seq_lens.clone(), kv_cache=inputs.kv_cache.clone())
    inputs = replace(inputs, max_seq_len=100)
    inputs.score()
    assert torch.equal(inputs.seq_lens, before.seq_lens)
    assert torch.equal(inputs.kv_cache, before.kv_cache)


@pytest.mark.parametrize(("num_rows", "max_seq_len"), [(0, 7), (3, 0), (3, 7)])
def test_nothing_to_score_gives_the_result_its_shape(num_rows: int, max_seq_len: int) -> None:
    inputs = replace(make_inputs([[0] * num_rows], 2), max_seq_len=max_seq_len)
    assert inputs.score().shape == (num_rows, max_seq_len)


@pytest.fixture(scope="module")
def operators() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    pytest.importorskip(
        "vllm._C", reason="vLLM's AVX-512 build does not load", exc_type=ImportError
    )
    return torch.ops._C.fp8_paged_mqa_logits_cpu, torch.ops._C.topk_transform_512_cpu


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_slots"),
    [(1, 1, 1), (37, 4, 129), (9, 64, 2_049), (130, 8, 1_000)],
    ids=lambda n: str(n),
)
def test_scores_agree_with_operator(
    operators: tuple[Callable[..., Tensor], Callable[..., None]],
    num_rows: int,
    num_heads: int,
    num_slots: int,
) -> None:
    operator, _ = operators
    inputs = make_inputs([causal(num_rows, num_slots), [0], causal(3, 70)], num_heads, page_gap=8)
    assert_equal_scores(inputs.score(operator), inputs)
    assert_equal_scores(inputs.score(), inputs)


@pytest.mark.parametrize(("num_heads", "num_slots"), [(4, 3_000), (64, 1_500)])
def test_top_k_agrees_with_operator_where_rounding_does_not_decide(
    operators: tuple[Callable[..., Tensor], Callable[..., None]], num_heads: int, num_slots: int
) -> None:
    operator, top_k = operators
    inputs = make_inputs([causal(60, num_slots), causal(60, TOP_K + 5)], num_heads)

    def chosen(scores: Tensor) -> Tensor:
        local = torch.empty(len(scores), TOP_K, dtype=torch.int32)
        pages = torch.empty_like(local)
        # Whatever is past the lengths is not read.
        scores = scores.masked_fill(~inputs.seen, torch.inf)
        top_k(scores, inputs.seq_lens, inputs.page_table, pages, inputs.block_size, local)
        return local.sort().values

    theirs = inputs.score(operator)
    same = (chosen(theirs) == chosen(inputs.score())).all(dim=1)
    best = theirs.masked_fill(~inputs.seen, -torch.inf).topk(TOP_K + 1).values
    margin = best[:, TOP_K - 1] - best[:, TOP_K]  # NaN where all slots are chosen
    _, tolerated = reference(inputs)
    decided = ~(margin <= 2 * tolerated.amax(dim=1))
    assert same[decided].all()
    assert decided.float().mean() > 0.9
