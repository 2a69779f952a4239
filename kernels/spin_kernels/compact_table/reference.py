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
    owners: Tensor | None = None,
) -> None:
    """List the pages of the planned blocks of some layers, which share a block table.

    Args:
        block_table: (int32): [rows, pages]; may be strided.
        plan: of the step.
        tables: (int32): [L, R, W]; written up to each row's count.
        first_layer, num_layers: which layers.
        num_rows: rows of this step.
        owners: (int32): [rows]; whose list each row takes; its own, unless they are given.
    """
    lists = list(range(num_rows)) if owners is None else owners[:num_rows].tolist()
    for index in range(first_layer, first_layer + num_layers):
        for row, owner in enumerate(lists):
            count = int(plan.counts[index, owner])
            blocks = plan.blocks[index, owner, :count].long()
            tables[index, row, :count] = torch.index_select(block_table[row], 0, blocks)
