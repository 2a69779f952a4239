"""Predicted block scores of the rows of a step with drafts, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import DraftRows, Histories, Rows

_BLOCKS = 16
# Enough to fill a GPU.
_PROGRAMS = 132 * 16


# One binary for all layers: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["first_layer"])
def _predict_kernel(
    vertical_ptr,
    diagonal_ptr,
    slots_ptr,
    positions_ptr,
    num_slots_ptr,
    starts_ptr,
    predicted_ptr,
    first_layer,
    num_states,
    max_slots,
    num_offsets,
    max_blocks,
    row_capacity,
    COMPRESS_RATIO: tl.constexpr,
    DENSE_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    request = tl.program_id(0)
    layer = (first_layer + tl.program_id(1)).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    first = tl.load(starts_ptr + request)
    last = tl.load(starts_ptr + request + 1)
    shortest = tl.load(num_slots_ptr + first, mask=first < last, other=0)
    if (slot >= 0) & (shortest > DENSE_SLOTS):
        state = layer * num_states + slot
        position = tl.load(positions_ptr + request)
        # The last row sees most.
        longest = tl.load(num_slots_ptr + last - 1).to(tl.int64)
        num_blocks = ((longest + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32)
        inner = tl.arange(0, BLOCK_SIZE)
        lowest = -float("inf")
        for start in range(tl.program_id(2) * BLOCKS, num_blocks, tl.num_programs(2) * BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            seen = block.to(tl.int64)[:, None] * BLOCK_SIZE + inner[None, :]
            v = tl.load(vertical_ptr + state * max_slots + seen, mask=seen < longest, other=0.0)
            v = v.to(tl.float32)
            for row in range(first, last):
                query = (position + row - first) // COMPRESS_RATIO
                num_slots = tl.load(num_slots_ptr + row).to(tl.int64)
                visible = seen < num_slots
                offset = query - seen
                stored = visible & (offset >= 0) & (offset < num_offsets)
                d = tl.load(diagonal_ptr + state * num_offsets + offset, mask=stored, other=0.0)
                score = tl.where(visible, tl.maximum(v, d.to(tl.float32)), lowest)
                at = (layer * row_capacity + row) * max_blocks + block
                largest = tl.max(score, 1)
                tl.store(predicted_ptr + at, largest, mask=largest > lowest)


def row_predict(
    histories: Histories,
    rows: Rows,
    drafts: DraftRows,
    predicted: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_requests: int,
    dense_slots: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    """See `spin_kernels.row_predict.reference`."""
    _, row_capacity, max_blocks = predicted.shape
    programs = triton.cdiv(_PROGRAMS, num_requests * num_layers)
    programs = max(1, min(triton.cdiv(max_blocks, _BLOCKS), programs))
    _predict_kernel[(num_requests, num_layers, programs)](
        histories.vertical,
        histories.diagonal,
        rows.slots,
        rows.positions,
        rows.num_slots,
        drafts.starts,
        predicted,
        first_layer,
        histories.num_states,
        histories.vertical.shape[1],
        histories.diagonal.shape[1],
        max_blocks,
        row_capacity,
        COMPRESS_RATIO=compress_ratio,
        DENSE_SLOTS=dense_slots,
        BLOCK_SIZE=block_size,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
