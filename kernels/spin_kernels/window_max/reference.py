"""Maxima of the diagonal history over every block, in plain torch."""

import torch

from spin_kernels.arguments import Histories, Rows


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
    """Take the maxima of D again for the rows whose query moved to another slot.

    Args:
        histories: `diagonal_max` is written; `diagonal_at` is written by the plan.
        rows: of the step.
        first_layer, num_layers: which layers.
        num_rows: rows of this step, the first of `rows`.
        dense_slots: rows of no more slots are left alone.
        block_size: slots per block.
        compress_ratio: tokens per slot.

    Source: SPIN, predicted slot score, pooled by its largest (arXiv 2610.09025).
    """
    width = histories.diagonal_max.shape[1]
    slots = torch.arange(width * block_size, device=histories.diagonal.device)
    num_states = histories.num_states
    steps = (rows.slots[:num_rows] >= 0) & (rows.num_slots[:num_rows] > dense_slots)
    for row in steps.nonzero()[:, 0].tolist():
        q = int(rows.positions[row]) // compress_ratio
        offsets = q - slots
        stored = (offsets >= 0) & (offsets < histories.diagonal.shape[1])
        visible = (slots < rows.num_slots[row]).view(width, block_size)
        for layer in range(first_layer, first_layer + num_layers):
            state = layer * num_states + int(rows.slots[row])
            if int(histories.diagonal_at[state]) == q:
                continue
            d = histories.diagonal[state, offsets.where(stored, 0)].where(stored, 0.0)
            d = d.view(width, block_size).masked_fill(~visible, -torch.inf)
            histories.diagonal_max[state] = d.amax(1)
