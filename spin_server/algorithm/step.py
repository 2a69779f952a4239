"""One decode step: plan which blocks to score, then learn from their scores.

Shapes: R requests of a batch, T rows each (1 + draft length), W blocks. A request's rows share
its history and, under speculation, one set of blocks. `plan_step` reads the histories;
`commit_step` is the only function that changes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spin_kernels.block_budget import block_budget, ceil_div, keep_count, num_explored
from spin_kernels.block_list import block_list, block_slots
from spin_kernels.block_pool import block_pool
from spin_kernels.block_predict import block_predict, slot_predict
from spin_kernels.block_select import (
    EXPLOIT,
    FORCED,
    INVISIBLE,
    SKIPPED,
    block_rank,
    block_select,
    stable_rank,
)
from spin_kernels.ema_update import ema_update
from spin_kernels.exploration_key import NONE, exploration_key
from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The queries of one step.

    Args:
        state_rows: (int64): [R]; each request's history, all different.
        query_positions: (int64): [R, T]; in slots.
        num_slots: (int64): [R, T]; slots visible to each row.
        request_keys: (int64): [R]; 64-bit keys of the random draw.
        layers: (int64): [R].
        diagonal_positions: (int64): [R, T]; where D places each query: an offset q - i lies at
            diagonal_positions - i. The query positions themselves (in blocks for A2), unless
            D's storage was laid out otherwise.
    """

    state_rows: Tensor
    query_positions: Tensor
    num_slots: Tensor
    request_keys: Tensor
    layers: Tensor
    diagonal_positions: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step scores.

    Args:
        outcomes: (int8): [R, T, W]; each row's own selection, in `block_select`'s codes.
        dense: (bool): [R]; the step scores every block.
        budgets: (int64): [R, T]; blocks each row may keep (slots in A0).
        shared: (bool): [R, W]; the blocks that all rows of the request score.
        blocks: (int32): [R, W]; the same as an ascending list padded with -1.
        num_blocks: (int64): [R, T]; blocks visible to each row.
        rank: (int64): [R, T, W]; the predicted order of the blocks, forced ones first.
    """

    outcomes: Tensor
    dense: Tensor
    budgets: Tensor
    shared: Tensor
    blocks: Tensor
    num_blocks: Tensor
    rank: Tensor


def _predict(
    options: SpinOptions, state: SpinState, inputs: StepInputs, num_blocks: Tensor, width: int
) -> Tensor:
    """Predicted block scores: [R * T, width]."""
    rows = inputs.query_positions.shape[1]
    pooled_first = options.variant == "A2"  # its histories are of blocks: one "slot" per block
    return block_predict(
        state.vertical,
        state.diagonal,
        inputs.state_rows.repeat_interleave(rows),
        inputs.diagonal_positions.flatten(),
        num_blocks if pooled_first else inputs.num_slots.flatten(),
        num_blocks=width,
        block_size=1 if pooled_first else options.block_size,
        pooling="max" if pooled_first else options.pooling,
    )


def _select_slots(
    options: SpinOptions, state: SpinState, inputs: StepInputs, budgets: Tensor, outcomes: Tensor
) -> Tensor:
    """A0: replace the exploited blocks by those that hold a top predicted slot."""
    rows, width = inputs.query_positions.shape[1], outcomes.shape[-1]
    predicted = slot_predict(
        state.vertical,
        state.diagonal,
        inputs.state_rows.repeat_interleave(rows),
        inputs.diagonal_positions.flatten(),
        num_slots=width * options.block_size,
    )
    slots = torch.arange(predicted.shape[1])
    visible = slots < inputs.num_slots.flatten()[:, None]
    rank = stable_rank(predicted.masked_fill(~visible, -torch.inf), descending=True)
    picked = visible & (rank < budgets[:, None])
    holds_one = picked.view(-1, width, options.block_size).any(-1)
    unforced = (outcomes != FORCED) & (outcomes != INVISIBLE)
    chosen = torch.where(holds_one, EXPLOIT, SKIPPED).to(torch.int8)
    return torch.where(unforced, chosen, outcomes)


def plan_step(
    options: SpinOptions,
    policies: PolicyRows,
    state: SpinState,
    inputs: StepInputs,
    *,
    width: int,
    wanted: Tensor | None = None,
) -> StepPlan:
    """Choose the blocks that each request scores in this step.

    Args:
        options, policies: SPIN's choices; one policy per request.
        state: the histories; read only.
        inputs: the step's queries.
        width: W, at least the blocks of the longest context.
        wanted: (int64): [R]; block budgets that replace ceil((1 - sparsity) * B).

    Returns:
        The plan. A step is dense right after a reset and at every probe.

    Source: SPIN, steps 1 to 5 of a decode step (arXiv 2610.09025).
    """
    requests, rows = inputs.query_positions.shape
    policy, sparsity, exploration = (
        column.repeat_interleave(rows)
        for column in (policies.exploration_policy, policies.sparsity, policies.exploration)
    )
    exploration = exploration.where(policy != NONE, 0)
    num_slots = inputs.num_slots.flatten()
    num_blocks = ceil_div(num_slots, options.block_size)
    visible = torch.arange(width) < num_blocks[:, None]

    block_scores = _predict(options, state, inputs, num_blocks, width)
    rank = block_rank(block_scores, num_blocks)
    if wanted is None:
        wanted_rows = keep_count(num_blocks, sparsity)
    else:
        wanted_rows = wanted.repeat_interleave(rows)
    budgets = block_budget(
        num_blocks, wanted_rows, top_k=options.top_k, block_size=options.block_size
    )
    explored = num_explored(budgets, num_blocks, exploration)
    keys = exploration_key(
        policy,
        block_scores,
        state.last_observed[inputs.state_rows, :width].repeat_interleave(rows, 0),
        visible,
        request_keys=inputs.request_keys.repeat_interleave(rows),
        # One draw for all rows of a request: with a draw each, drafts would explore other blocks
        # each, and their union would eat the sparsity (docs/log.md).
        query_positions=inputs.query_positions[:, 0].repeat_interleave(rows),
        layers=inputs.layers.repeat_interleave(rows),
        seed=options.seed,
    )
    outcomes = block_select(rank, num_blocks, budgets, explored, keys)
    total = num_blocks
    if options.variant == "A0":
        budgets, total = keep_count(num_slots, sparsity), num_slots
        outcomes = _select_slots(options, state, inputs, budgets, outcomes)

    steps, period = state.steps[inputs.state_rows], policies.probe_period
    dense = (steps == 0) | ((period > 0) & (steps % period.clamp(min=1) == 0))
    shape = (requests, rows)
    outcomes = outcomes.view(*shape, width)
    shared = _share_mask(options, outcomes, num_blocks.view(shape))
    shared = torch.where(dense[:, None], visible.view(*shape, width).any(1), shared)
    return StepPlan(
        outcomes=outcomes,
        dense=dense,
        budgets=torch.where(dense[:, None], total.view(shape), budgets.view(shape)),
        shared=shared,
        blocks=block_list(shared)[0],
        num_blocks=num_blocks.view(shape),
        rank=rank.view(*shape, width),
    )


def _share_mask(options: SpinOptions, outcomes: Tensor, num_blocks: Tensor) -> Tensor:
    """Merge the rows' selections into the one set that the indexer takes: [R, W]."""
    selected = outcomes > SKIPPED
    if options.mask_sharing == "union":
        return selected.any(1)
    newest = torch.arange(outcomes.shape[-1]) == num_blocks[:, :, None] - 1
    return selected[:, 0] | newest.any(1)


def gather_scores(scores: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Compact dense scores to the listed blocks, as the indexer returns them.

    Args:
        scores: (float32): [R, T, slots].
        blocks: (int32): [R, width]; padded with -1.
        block_size: slots per block.

    Returns:
        (float32): [R, T, width * block_size]; NaN past the end of the context.
    """
    limit = torch.full((len(blocks),), scores.shape[-1])
    slots, inside = block_slots(blocks, limit, block_size)
    index = slots[:, None].expand(-1, scores.shape[1], -1)
    return scores.gather(2, index).masked_fill(~inside[:, None], torch.nan)


def commit_step(
    options: SpinOptions,
    policies: PolicyRows,
    state: SpinState,
    inputs: StepInputs,
    plan: StepPlan,
    scores: Tensor,
    accepted: Tensor,
) -> None:
    """Fold the verified rows' scores into the histories, in row order.

    Args:
        options, policies, inputs, plan: those of the step.
        state: the histories; changed in place.
        scores: (float32): [R, T, W * block_size]; compact, in the order of plan.blocks.
        accepted: (int64): [R]; accepted drafts a: rows 0..a happened, the rest never did.

    Source: SPIN, step 7 and prefix-valid replay (arXiv 2610.09025).
    """
    for row in range(inputs.query_positions.shape[1]):
        if row > 0 and options.update_rule == "row0":
            break
        valid = (accepted >= row).nonzero()[:, 0]
        if len(valid) == 0:
            break
        observed = _observe(options, policies, state, inputs, plan, scores, valid, row)
        request, column = observed.nonzero(as_tuple=True)
        states = inputs.state_rows[valid][request]
        seen = plan.blocks[valid][request, column].long()
        state.last_observed[states, seen] = state.steps[states]
    state.steps[inputs.state_rows] += 1


def _observe(
    options: SpinOptions,
    policies: PolicyRows,
    state: SpinState,
    inputs: StepInputs,
    plan: StepPlan,
    scores: Tensor,
    valid: Tensor,
    row: int,
) -> Tensor:
    """Update the histories of the valid requests from one row; which blocks were observed."""
    blocks, z = plan.blocks[valid], scores[valid, row]
    num_visible, block_size = inputs.num_slots[valid, row], options.block_size
    if options.variant == "A2":
        _, visible = block_slots(blocks, num_visible, block_size)
        present = visible & z.isfinite()
        shape = (*blocks.shape, block_size)
        pooled = block_pool(z.view(shape), present.view(shape), options.pooling)
        z = pooled.float()  # -inf where nothing was present: no observation
        num_visible, block_size = plan.num_blocks[valid, row], 1
    return ema_update(
        state.vertical,
        state.diagonal,
        inputs.state_rows[valid],
        inputs.diagonal_positions[valid, row],
        num_visible,
        z,
        blocks,
        policies.decay[valid],
        policies.gain[valid],
        block_size=block_size,
    )
