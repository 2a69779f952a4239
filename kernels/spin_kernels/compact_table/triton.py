"""Compact block tables, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import StepPlan

_WIDTH = 1024


@triton.jit
def _table_kernel(
    pages_ptr,
    pages_stride,
    blocks_ptr,
    blocks_stride,
    counts_ptr,
    table_ptr,
    table_stride,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + row)
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        listed = place < count
        block = tl.load(blocks_ptr + row * blocks_stride + place, mask=listed, other=0)
        page = tl.load(pages_ptr + row * pages_stride + block, mask=listed, other=0)
        tl.store(table_ptr + row * table_stride + place, page, mask=listed)


def compact_table(
    block_table: Tensor, plan: StepPlan, layer_index: int, table: Tensor, *, num_rows: int
) -> None:
    """See `spin_kernels.compact_table.reference`."""
    blocks = plan.blocks[layer_index]
    _table_kernel[(num_rows,)](
        block_table,
        block_table.stride(0),
        blocks,
        blocks.stride(0),
        plan.counts[layer_index],
        table,
        table.stride(0),
        WIDTH=_WIDTH,
        num_warps=4,
    )
