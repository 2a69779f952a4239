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
    owners_ptr,
    tables_ptr,
    first_layer,
    list_capacity,
    row_capacity,
    max_blocks,
    OWNED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = (first_layer + tl.program_id(1)).to(tl.int64)
    owner = row
    if OWNED:
        owner = tl.load(owners_ptr + row).to(tl.int64)
    planned = layer * list_capacity + owner
    table = tables_ptr + (layer * row_capacity + row) * max_blocks
    count = tl.load(counts_ptr + planned)
    for start in range(0, count, WIDTH):
        place = start + tl.arange(0, WIDTH)
        listed = place < count
        block = tl.load(blocks_ptr + planned * max_blocks + place, mask=listed, other=0)
        page = tl.load(pages_ptr + row * pages_stride + block, mask=listed, other=0)
        tl.store(table + place, page, mask=listed)


def compact_table(
    block_table: Tensor,
    plan: StepPlan,
    tables: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_rows: int,
    owners: Tensor | None = None,
) -> None:
    """See `spin_kernels.compact_table.reference`."""
    _, row_capacity, max_blocks = tables.shape
    _table_kernel[(num_rows, num_layers)](
        block_table,
        block_table.stride(0),
        plan.blocks,
        plan.counts,
        plan.counts if owners is None else owners,
        tables,
        first_layer,
        plan.counts.shape[1],
        row_capacity,
        max_blocks,
        OWNED=owners is not None,
        WIDTH=_WIDTH,
        num_warps=4,
    )
