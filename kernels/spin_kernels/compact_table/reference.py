"""Compact block tables, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import StepPlan


def compact_table(
    block_table: Tensor,
    plan: StepPlan,
    tables: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_rows: int,
) -> None:
    """List the pages of the planned blocks of some layers, which share a block table.

    Args:
        block_table: (int32): [rows, pages]; may be strided.
        plan: of the step.
        tables: (int32): [L, R, W]; written up to each row's count.
        first_layer, num_layers: which layers.
        num_rows: rows of this step.
    """
    for index in range(first_layer, first_layer + num_layers):
        for row, count in enumerate(plan.counts[index, :num_rows].tolist()):
            blocks = plan.blocks[index, row, :count].long()
            tables[index, row, :count] = torch.index_select(block_table[row], 0, blocks)
