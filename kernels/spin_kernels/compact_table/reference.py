"""Compact block tables, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import StepPlan


def compact_table(
    block_table: Tensor, plan: StepPlan, tables: Tensor, *, first_layer: int, num_rows: int
) -> None:
    """List the pages of the planned blocks of some layers, which share a block table.

    Args:
        block_table: (int32): [rows, pages]; may be strided.
        plan: of the step.
        tables: (int32): [layers, R, W]; written up to each row's count.
        first_layer: 0..L-1; what `tables` starts with.
        num_rows: rows of this step.
    """
    for index, table in enumerate(tables, start=first_layer):
        for row, count in enumerate(plan.counts[index, :num_rows].tolist()):
            blocks = plan.blocks[index, row, :count].long()
            table[row, :count] = torch.index_select(block_table[row], 0, blocks)
