"""The plan of a step with drafts, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.arguments import DraftRows, Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.block_budget import block_budget, ceil_div, keep_count, num_explored
from spin_kernels.block_list import block_list
from spin_kernels.block_select import EXPLOIT, EXPLORE, FORCED, SKIPPED, block_rank, block_select
from spin_kernels.exploration_key import NONE, exploration_key

_CODES = (EXPLOIT, EXPLORE, FORCED, SKIPPED)
# Where rows disagree on what a block is to them, it counts as the first of these.
_PRECEDENCE = torch.tensor([0, 1, 3, 2, 4])  # of INVISIBLE, SKIPPED, EXPLOIT, EXPLORE, FORCED


def plan_union(
    histories: Histories,
    rows: Rows,
    drafts: DraftRows,
    policies: PolicyColumns,
    layers: Tensor,
    predicted: Tensor,
    plan: StepPlan,
    first_slots: Tensor,
    *,
    first_layer: int,
    num_layers: int,
    num_requests: int,
    top_k: int,
    dense_slots: int,
    block_size: int,
    compress_ratio: int,
    seed: int,
    row0: bool = False,
) -> None:
    """Choose for every row, and list for each request what any of its rows chose.

    A request without a history, or whose first row sees at most `dense_slots`, scores all its
    blocks and is no step.

    Args:
        histories: `last_observed` is read, `steps` are written.
        rows: of the step: `positions` are those of each request's first row, `num_slots` all rows'.
        drafts: which rows are whose.
        policies: of the step.
        layers: (int64): [L]; the layers' numbers in the model.
        predicted: (float32): [L, T, W]; see `row_predict`.
        plan: written: lists by request, and `lengths` (int32): [L, T] by row: how many of the
            listed blocks' slots the row may see.
        first_slots: (int32): [L, R]; written: slots that the first row sees.
        first_layer, num_layers: which layers.
        num_requests: of this step.
        top_k, block_size, compress_ratio: K, b and the tokens of a slot.
        dense_slots: K or more.
        seed: of the random exploration, which all rows of a request share.
        row0: the first row chooses for all, and each adds its newest block (an ablation).

    Source: SPIN, speculative decoding: row-local masks, shared as their union (arXiv 2610.09025).
    """
    starts, width = drafts.starts.tolist(), predicted.shape[2]
    every = torch.arange(width, device=predicted.device)
    for request in range(num_requests):
        first, last = starts[request], starts[request + 1]
        num_slots = rows.num_slots[first:last].long()
        num_blocks = ceil_div(num_slots, block_size)
        slot, longest = int(rows.slots[request]), int(num_blocks.max()) if first < last else 0
        active = slot >= 0 and first < last and int(num_slots[0]) > dense_slots
        visible = every < longest
        for index in range(first_layer, first_layer + num_layers):
            chosen, step = visible, -1
            if active:
                state, policy = index * histories.num_states + slot, int(rows.policies[request])
                step = int(histories.steps[state])
                period = int(policies.probe_period[policy])
                dense = step == 0 or (period > 0 and step % period == 0)
                counts = torch.tensor([0, 0, 0, 0, longest], device=predicted.device)
                if not dense:
                    outcomes = _choose(
                        histories,
                        rows,
                        policies,
                        predicted[index, first:last],
                        num_blocks,
                        request,
                        state,
                        int(layers[index]),
                        top_k=top_k,
                        block_size=block_size,
                        compress_ratio=compress_ratio,
                        seed=seed,
                    )
                    merged = _merge(outcomes, num_blocks, row0=row0).where(visible, -1)
                    chosen = merged > SKIPPED
                    found = [(merged == code).sum() for code in _CODES]
                    counts = torch.stack([*found, torch.zeros_like(found[0])])
                plan.outcomes[index, policy] += counts
                histories.steps[state] = step + 1
            blocks, _ = block_list(chosen[None])
            count = int(chosen.sum())
            plan.blocks[index, request, :count] = blocks[0, :count]
            plan.counts[index, request] = count
            plan.step_numbers[index, request] = step
            first_slots[index, request] = num_slots[0] if first < last else 0
            seen = (num_slots[:, None] - every * block_size).clamp(0, block_size)
            plan.lengths[index, first:last] = (seen * chosen).sum(1).int()


def _merge(outcomes: Tensor, num_blocks: Tensor, *, row0: bool) -> Tensor:
    """Say what each block is to the request: [rows, W] to [W], in `block_select`'s codes."""
    if row0:
        newest = torch.arange(outcomes.shape[1], device=outcomes.device) == num_blocks[:, None] - 1
        forced = torch.full_like(outcomes[0], FORCED)
        shown = outcomes[0].clamp(min=SKIPPED)  # what later rows see, the first one skips
        return forced.where(newest.any(0), shown)
    order = _PRECEDENCE.to(outcomes.device)
    places = order[outcomes.long() + 1].amax(0)
    return (torch.argsort(order)[places] - 1).to(outcomes.dtype)


def _choose(
    histories: Histories,
    rows: Rows,
    policies: PolicyColumns,
    predicted: Tensor,
    num_blocks: Tensor,
    request: int,
    state: int,
    layer: int,
    *,
    top_k: int,
    block_size: int,
    compress_ratio: int,
    seed: int,
) -> Tensor:
    """Select for each row as if the step were not dense: [rows, W]."""
    count, policy = len(predicted), rows.policies[request].expand(len(predicted))
    visible = torch.arange(predicted.shape[1], device=predicted.device) < num_blocks[:, None]
    scores = predicted.where(visible, 0.0)  # what nobody sees is not written
    kind = policies.exploration_policy[policy]
    share = policies.exploration[policy].where(kind != NONE, 0)
    wanted = keep_count(num_blocks, policies.sparsity[policy])
    budgets = block_budget(num_blocks, wanted, top_k=top_k, block_size=block_size)
    keys = exploration_key(
        kind,
        scores,
        histories.last_observed[state].long().expand(count, -1),
        visible,
        request_keys=rows.keys[request].expand(count),
        query_positions=(rows.positions[request] // compress_ratio).expand(count),
        layers=torch.full((count,), layer, device=predicted.device),
        seed=seed,
    )
    explored = num_explored(budgets, num_blocks, share)
    return block_select(block_rank(scores, num_blocks), num_blocks, budgets, explored, keys)
