"""The plan of a step, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.block_budget import block_budget, ceil_div, keep_count, num_explored
from spin_kernels.block_list import block_list
from spin_kernels.block_select import (
    EXPLOIT,
    EXPLORE,
    FORCED,
    SKIPPED,
    block_rank,
    block_select,
)
from spin_kernels.exploration_key import NONE, exploration_key

_CODES = (EXPLOIT, EXPLORE, FORCED, SKIPPED)


def plan_blocks(
    histories: Histories,
    rows: Rows,
    policies: PolicyColumns,
    layers: Tensor,
    plan: StepPlan,
    *,
    first_layer: int,
    num_layers: int,
    num_rows: int,
    top_k: int,
    dense_slots: int,
    block_size: int,
    compress_ratio: int,
    seed: int,
) -> None:
    """Choose the blocks that the rows of some layers score, from the maxima of their histories.

    A row without a history, or with at most `dense_slots`, scores all its blocks and is no step.

    Args:
        histories: `steps` and `diagonal_at` are written, the rest is read.
        rows, policies: of the step.
        layers: (int64): [L]; the layers' numbers in the model.
        plan: written.
        first_layer, num_layers: which layers.
        num_rows: rows of this step, the first of `rows`.
        top_k, block_size, compress_ratio: K, b and the tokens of a slot.
        dense_slots: K or more.
        seed: of the random exploration.

    Source: SPIN, steps 1 to 5 of a decode step (arXiv 2610.09025), variant A1 with max pooling.
    """
    num_slots = rows.num_slots[:num_rows].long()
    num_blocks = ceil_div(num_slots, block_size)
    width = histories.vertical_max.shape[1]
    visible = torch.arange(width, device=num_slots.device) < num_blocks[:, None]
    slots = rows.slots[:num_rows]
    active = ((slots >= 0) & (num_slots > dense_slots)).nonzero()[:, 0]
    for index in range(first_layer, first_layer + num_layers):
        layer = int(layers[index])
        mask = visible.clone()
        plan.step_numbers[index, :num_rows] = -1
        if len(active):
            states = index * histories.num_states + slots[active]
            steps = histories.steps[states]
            period = policies.probe_period[rows.policies[active]]
            dense = (steps == 0) | ((period > 0) & (steps % period.clamp(min=1) == 0))
            outcomes = _choose(
                histories,
                rows,
                policies,
                active,
                states,
                layer,
                top_k=top_k,
                block_size=block_size,
                compress_ratio=compress_ratio,
                seed=seed,
            )
            mask[active] = (outcomes > SKIPPED) | (dense[:, None] & visible[active])
            found = [((outcomes == code) & ~dense[:, None]).sum(1) for code in _CODES]
            blocks_by_row = torch.stack([*found, num_blocks[active] * dense], dim=1)
            plan.outcomes[index].index_add_(0, rows.policies[active], blocks_by_row)
            plan.step_numbers[index, active] = steps
            histories.steps[states] = steps + 1
            histories.diagonal_at[states] = rows.positions[active] // compress_ratio
        blocks, counts = block_list(mask)
        listed = blocks >= 0
        plan.blocks[index, :num_rows][listed] = blocks[listed]
        plan.counts[index, :num_rows] = counts
        hidden = num_blocks * block_size - num_slots  # slots of the newest block not yet there
        plan.lengths[index, :num_rows] = (counts * block_size - hidden).to(torch.int32)


def _choose(
    histories: Histories,
    rows: Rows,
    policies: PolicyColumns,
    active: Tensor,
    states: Tensor,
    layer: int,
    *,
    top_k: int,
    block_size: int,
    compress_ratio: int,
    seed: int,
) -> Tensor:
    """Select as if no step were dense: [active, W], in `block_select`'s codes."""
    policy, num_slots = rows.policies[active], rows.num_slots[active].long()
    positions = rows.positions[active] // compress_ratio
    num_blocks = ceil_div(num_slots, block_size)
    scores = torch.maximum(histories.vertical_max[states], histories.diagonal_max[states])
    width = scores.shape[1]
    visible = torch.arange(width, device=scores.device) < num_blocks[:, None]
    for row, (state, q, n) in enumerate(
        zip(states.tolist(), positions.tolist(), num_slots.tolist(), strict=True)
    ):
        # A slot may have become visible since the newest block's maxima were taken.
        first = (n - 1) // block_size * block_size
        offsets = q - torch.arange(first, n, device=scores.device)
        stored = (offsets >= 0) & (offsets < histories.diagonal.shape[1])
        d = histories.diagonal[state, offsets.where(stored, 0)].where(stored, 0.0)
        v = histories.vertical[state, first:n]
        scores[row, first // block_size] = torch.maximum(v, d).max()
    kind = policies.exploration_policy[policy]
    share = policies.exploration[policy].where(kind != NONE, 0)
    wanted = keep_count(num_blocks, policies.sparsity[policy])
    budgets = block_budget(num_blocks, wanted, top_k=top_k, block_size=block_size)
    keys = exploration_key(
        kind,
        scores,
        histories.last_observed[states].long(),
        visible,
        request_keys=rows.keys[active],
        query_positions=positions,
        layers=torch.full_like(active, layer),
        seed=seed,
    )
    explored = num_explored(budgets, num_blocks, share)
    return block_select(block_rank(scores, num_blocks), num_blocks, budgets, explored, keys)
