"""The indexer's scores of a prefill step, by matrix multiplication.

vLLM's CPU operator scores one slot for one row at a time, which suits a decode step. The rows of a
prefill step share their request's keys: decoded once, these make a matrix multiplication. FP8
values are exact in float32, so the two differ by the order of summation alone. Where that decides
which of two slots is the 512th best, the two choose differently.
"""

from itertools import pairwise

import torch
from torch import Tensor

SCALE_BYTES = 4

# Keys decoded at a time: 8 MiB of float32 at a head size of 128.
PANEL_SLOTS = 16_384
# A product is [rows * heads, TILE_SLOTS] float32 of at most 4 MiB, so that it is still in the cache
# when it is summed over the heads.
TILE_SLOTS = 2_048
PRODUCT_NUMEL = 1_048_576


def paged_mqa_logits_gemm(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    block_size: int,
    max_seq_len: int,
) -> Tensor:
    """Score each row's slots as fp8_paged_mqa_logits_cpu does, for many rows per request.

    Neighbouring rows with the same pages are scored together, and each such group decodes its keys
    anew: where its rows times heads are fewer than about 24, vLLM's operator is faster. Besides the
    result this holds at most 20 MiB (20,971,520 bytes; for up to 512 heads of size 128, and pages
    of up to 16,384 slots) and one byte per row and page.

    Args:
        q (float8_e4m3fn): [rows, heads, head_size]
        kv_cache (uint8): [pages, page bytes], pages any stride apart. A page is block_size keys
            [head_size] (float8_e4m3fn), then block_size scales (float32).
        weights (float32): [rows, heads]
        seq_lens (int32 or int64): [rows], the slots that a row sees, 0 included.
        page_table (int32 or int64): [rows, at least ceil(seq_lens / block_size)]
        block_size: slots per page.
        max_seq_len: columns of the result; slots past it are not scored.

    Returns:
        [rows, max_seq_len] float32: scale * sum over heads of weight * relu(q . key). What is past
        a row's seq_lens is undefined, as it is after vLLM's operator: topk_transform_512_cpu does
        not read it.

    Source: vllm/_custom_ops.py (fp8_paged_mqa_logits_cpu, topk_transform_512_cpu)
    """
    num_rows, num_heads, head_size = q.shape
    logits = torch.empty(num_rows, max_seq_len, dtype=torch.float32)
    if logits.numel() == 0:
        return logits
    seq_lens = seq_lens.clamp(max=max_seq_len)
    num_pages = -(-int(seq_lens.max()) // block_size)
    panel_pages = max(1, min(num_pages, PANEL_SLOTS // block_size))
    panel_slots = panel_pages * block_size
    panel = torch.empty(panel_slots, head_size, dtype=torch.float32)
    tile_rows = min(num_rows, max(1, PRODUCT_NUMEL // (TILE_SLOTS * num_heads)))
    tile_slots = min(panel_slots, TILE_SLOTS)
    product = torch.empty(tile_rows * num_heads * tile_slots, dtype=torch.float32)

    for first, last in _equal_runs(page_table[:, :num_pages]):
        num_slots = int(seq_lens[first:last].max())
        for start in range(0, num_slots, panel_slots):
            pages = page_table[first, start // block_size : -(-num_slots // block_size)]
            keys, scales = _decode(kv_cache, pages[:panel_pages], block_size, panel)
            for top in range(first, last, tile_rows):
                rows = slice(top, min(top + tile_rows, last))
                end = min(int(seq_lens[rows].max()), start + panel_slots)
                queries = q[rows].float()
                for left in range(start, end, tile_slots):
                    right = min(left + tile_slots, end)
                    slots = slice(left - start, right - start)
                    _score(
                        queries,
                        keys[slots],
                        scales[slots],
                        weights[rows],
                        product,
                        logits[rows, left:right],
                    )
    return logits


def _equal_runs(table: Tensor) -> list[tuple[int, int]]:
    """Return the first row and the one past the last of each run of equal rows."""
    changes = (table[1:] != table[:-1]).any(dim=1)
    cuts = changes.nonzero().flatten() + 1
    return list(pairwise([0, *cuts.tolist(), table.shape[0]]))


def _decode(
    kv_cache: Tensor, pages: Tensor, block_size: int, panel: Tensor
) -> tuple[Tensor, Tensor]:
    """Read the pages' keys [slots, head_size] into the panel, and their scales [slots]."""
    head_size = panel.shape[1]
    key_bytes = block_size * head_size
    page_bytes = key_bytes + block_size * SCALE_BYTES
    pages = pages.long()
    keys = panel[: len(pages) * block_size]
    raw = kv_cache[:, :key_bytes][pages]
    keys.copy_(raw.view(torch.float8_e4m3fn).view(-1, head_size))
    scales = kv_cache[:, key_bytes:page_bytes][pages].view(torch.float32)
    return keys, scales.flatten()


def _score(
    queries: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, product: Tensor, out: Tensor
) -> None:
    """Write the scores of [rows, heads, head_size] queries for [slots, head_size] keys to out."""
    num_rows, num_heads, _ = queries.shape
    shape = (num_rows * num_heads, len(keys))
    dots = product[: shape[0] * shape[1]].view(shape)
    torch.mm(queries.flatten(0, 1), keys.t(), out=dots).relu_()
    summed = torch.bmm(weights[:, None], dots.view(num_rows, num_heads, -1))  # [rows, 1, slots]
    torch.mul(summed[:, 0], scales, out=out)
