"""Maxima of the diagonal history over every block, as one Triton kernel."""

import triton
import triton.language as tl

from spin_kernels.arguments import Histories, Rows

_BLOCKS = 16
# Enough to fill a GPU. Fewer leave the model's kernels beside them no more room (docs/log.md).
_PROGRAMS = 132 * 16


# One binary for all layers: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["first_layer"])
def _window_kernel(
    diagonal_ptr,
    diagonal_max_ptr,
    diagonal_at_ptr,
    slots_ptr,
    positions_ptr,
    num_slots_ptr,
    first_layer,
    num_states,
    num_offsets,
    max_blocks,
    COMPRESS_RATIO: tl.constexpr,
    DENSE_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    num_slots = tl.load(num_slots_ptr + row).to(tl.int64)
    if (slot >= 0) & (num_slots > DENSE_SLOTS):
        state = (first_layer + tl.program_id(1)).to(tl.int64) * num_states + slot
        query = tl.load(positions_ptr + row) // COMPRESS_RATIO
        if tl.load(diagonal_at_ptr + state) != query:
            num_blocks = ((num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32)
            inner = tl.arange(0, BLOCK_SIZE)
            lowest = -float("inf")
            for start in range(tl.program_id(2) * BLOCKS, num_blocks, tl.num_programs(2) * BLOCKS):
                block = start + tl.arange(0, BLOCKS)
                seen = block.to(tl.int64)[:, None] * BLOCK_SIZE + inner[None, :]
                visible = seen < num_slots
                offset = query - seen
                stored = visible & (offset >= 0) & (offset < num_offsets)
                d = tl.load(diagonal_ptr + state * num_offsets + offset, mask=stored, other=0.0)
                largest = tl.max(tl.where(visible, d.to(tl.float32), lowest), 1)
                tl.store(
                    diagonal_max_ptr + state * max_blocks + block, largest, mask=block < num_blocks
                )


def window_max(
    histories: Histories,
    rows: Rows,
    *,
    first_layer: int,
    num_layers: int,
    num_rows: int,
    dense_slots: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    """See `spin_kernels.window_max.reference`."""
    max_blocks = histories.diagonal_max.shape[1]
    programs = triton.cdiv(_PROGRAMS, num_rows * num_layers)
    _window_kernel[(num_rows, num_layers, max(1, min(triton.cdiv(max_blocks, _BLOCKS), programs)))](
        histories.diagonal,
        histories.diagonal_max,
        histories.diagonal_at,
        rows.slots,
        rows.positions,
        rows.num_slots,
        first_layer,
        histories.num_states,
        histories.diagonal.shape[1],
        max_blocks,
        COMPRESS_RATIO=compress_ratio,
        DENSE_SLOTS=dense_slots,
        BLOCK_SIZE=block_size,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
