"""Compact block tables, as one Triton kernel: one program per row and layer."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import StepPlan

_WIDTH = 1024


# One binary for all layers: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["first_layer"])
def _table_kernel(
    pages_ptr,
    pages_stride,
    blocks_ptr,
    counts_ptr,
    tables_ptr,
    first_layer,
    row_capacity,
    max_blocks,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    planned = (first_layer + tl.program_id(1)).to(tl.int64) * row_capacity + row
    count = tl.load(counts_ptr + planned)
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        listed = place < count
        block = tl.load(blocks_ptr + planned * max_blocks + place, mask=listed, other=0)
        page = tl.load(pages_ptr + row * pages_stride + block, mask=listed, other=0)
        tl.store(tables_ptr + planned * max_blocks + place, page, mask=listed)


def compact_table(
    block_table: Tensor,
    plan: StepPlan,
    tables: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_rows: int,
) -> None:
    """See `spin_kernels.compact_table.reference`."""
    _, row_capacity, max_blocks = tables.shape
    _table_kernel[(num_rows, num_layers)](
        block_table,
        block_table.stride(0),
        plan.blocks,
        plan.counts,
        tables,
        first_layer,
        row_capacity,
        max_blocks,
        WIDTH=_WIDTH,
        num_warps=4,
    )
