"""The update of a layer's histories, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.ema_update import ema_update


def history_update(
    histories: Histories,
    rows: Rows,
    policies: PolicyColumns,
    plan: StepPlan,
    layer_index: int,
    scores: Tensor,
    *,
    num_rows: int,
    block_size: int,
    compress_ratio: int,
    beside: bool = False,
    accepted: Tensor | None = None,
    draft: int = 0,
) -> None:
    """Fold a layer's compact scores into V and D, and take the scored blocks' maxima again.

    Args:
        histories: changed in place.
        rows, policies, plan: of the step.
        layer_index: 0..L-1.
        scores: (float): [num_rows, at least the longest compact length]; entries past a row's
            length may hold anything.
        num_rows: rows of this step, the first of `rows`.
        block_size: slots per block.
        compress_ratio: tokens per slot.
        beside: leave most of a GPU to what runs at the same time; the histories are the same.
        accepted: (int32): [R]; drafts of each request that happened, where rows are drafts.
        draft: which draft the rows are, from 1; those of it that never happened change nothing.

    Source: SPIN, history update (arXiv 2610.09025).
    """
    first = layer_index * histories.num_states
    learning = plan.step_numbers[layer_index, :num_rows] >= 0
    if accepted is not None:
        learning &= accepted[:num_rows] >= draft
    for row in learning.nonzero()[:, 0].tolist():
        count, n = int(plan.counts[layer_index, row]), int(rows.num_slots[row])
        state = first + int(rows.slots[row])
        q = int(rows.positions[row]) // compress_ratio
        blocks = plan.blocks[layer_index, row, :count]
        policy = rows.policies[row : row + 1]
        z = scores.new_full((1, count * block_size), torch.nan, dtype=torch.float32)
        length = min(count * block_size, scores.shape[1])
        z[0, :length] = scores[row, :length]
        observed = ema_update(
            histories.vertical,
            histories.diagonal,
            torch.tensor([state], device=z.device),
            torch.tensor([q], device=z.device),
            torch.tensor([n], device=z.device),
            z,
            blocks[None],
            policies.decay[policy],
            policies.gain[policy],
            block_size=block_size,
        )
        seen = blocks[observed[0]].long()
        histories.last_observed[state, seen] = plan.step_numbers[layer_index, row]
        slots = blocks.long()[:, None] * block_size + torch.arange(block_size, device=z.device)
        visible, offsets = slots < n, q - slots
        stored = (offsets >= 0) & (offsets < histories.diagonal.shape[1])
        v = histories.vertical[state, slots.where(visible, 0)]
        d = histories.diagonal[state, offsets.where(stored, 0)].where(stored, 0.0)
        for name, values in (("vertical_max", v), ("diagonal_max", d)):
            largest = values.float().masked_fill(~visible, -torch.inf).amax(1)
            getattr(histories, name)[state, blocks.long()] = largest
