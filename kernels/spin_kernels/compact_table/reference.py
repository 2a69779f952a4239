"""Compact block tables, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import StepPlan


def compact_table(
    block_table: Tensor, plan: StepPlan, layer_index: int, table: Tensor, *, num_rows: int
) -> None:
    """List the pages of a layer's blocks.

    Args:
        block_table: (int32): [rows, pages]; may be strided.
        plan: of the step.
        layer_index: 0..L-1.
        table: (int32): [R, W]; written up to each row's count.
        num_rows: rows of this step.
    """
    for row, count in enumerate(plan.counts[layer_index, :num_rows].tolist()):
        blocks = plan.blocks[layer_index, row, :count].long()
        table[row, :count] = torch.index_select(block_table[row], 0, blocks)
