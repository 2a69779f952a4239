"""Replay SPIN over a trace, all layers of a step at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_kernels.block_budget import ceil_div
from spin_server.algorithm.miss import dense_top_k, miss_curve, miss_rate, top_k_per_block
from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import (
    StepInputs,
    StepPlan,
    commit_step,
    gather_scores,
    plan_step,
)
from spin_server.errors import InputError
from spin_server.policy.policy import Policy
from spin_server.replay.diagonal import diagonal_layout
from spin_server.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step of one layer did.

    Args:
        blocks: the scored blocks, ascending.
        num_blocks: B of the step's longest context.
        budgets: per row, in blocks (in slots for A0).
        misses: per row, 0..1.
        dense: whether every block was scored.
        accepted: accepted drafts; rows 0..accepted count.
        miss_curve: at probe steps after the first, row 0's miss rate at every budget.
    """

    blocks: list[int]
    num_blocks: int
    budgets: list[int]
    misses: list[float]
    dense: bool
    accepted: int
    miss_curve: list[float] | None


def replay(
    trace: Trace,
    options: SpinOptions,
    policy: Policy,
    budgets: Sequence[int] | None = None,
) -> list[list[StepRecord]]:
    """Replay a trace.

    Args:
        trace: what was recorded.
        options, policy: SPIN's choices.
        budgets: one block budget per step, replacing ceil((1 - sparsity) * B).

    Returns:
        For each layer, one record per step.

    Raises:
        InputError: options that exclude each other, or budgets of the wrong length.
    """
    _check(trace, options, policy, budgets)
    num_layers, num_steps, _, num_slots = trace.scores.shape
    width = -(-num_slots // options.block_size)
    positions, lengths = trace.query_positions, trace.context_slots
    if options.variant == "A2":
        positions = torch.div(positions, options.block_size, rounding_mode="floor")
        lengths = ceil_div(lengths, options.block_size)
    places, num_offsets = diagonal_layout(positions, lengths)
    state = SpinState.zeros(
        num_layers,
        num_positions=width * (1 if options.variant == "A2" else options.block_size),
        num_offsets=num_offsets,
        num_blocks=width,
        history=options.history,
    )
    rows_of = PolicyRows.of([policy] * num_layers)
    every_layer = torch.arange(num_layers)

    def per_layer(values: Tensor) -> Tensor:
        return values.expand(num_layers, *values.shape)

    records: list[list[StepRecord]] = [[] for _ in range(num_layers)]
    for step in range(num_steps):
        if trace.turn_starts[step]:
            state.reset(every_layer)
        inputs = StepInputs(
            state_rows=every_layer,
            query_positions=per_layer(trace.query_positions[step]),
            num_slots=per_layer(trace.context_slots[step]),
            request_keys=torch.full((num_layers,), trace.request_key),
            layers=trace.layers,
            diagonal_positions=per_layer(places[step]),
        )
        wanted = None if budgets is None else torch.full((num_layers,), budgets[step])
        plan = plan_step(options, rows_of, state, inputs, width=width, wanted=wanted)
        scores, accepted = trace.scores[:, step], int(trace.accepted[step])
        probed = bool(policy.probe_period) and bool(plan.dense[0]) and bool(state.steps[0] > 0)
        for layer, record in enumerate(
            _records(options, inputs, plan, scores, accepted, with_curve=probed)
        ):
            records[layer].append(record)
        commit_step(
            options,
            rows_of,
            state,
            inputs,
            plan,
            gather_scores(scores, plan.blocks, options.block_size),
            torch.full((num_layers,), accepted),
        )
    return records


def _check(
    trace: Trace, options: SpinOptions, policy: Policy, budgets: Sequence[int] | None
) -> None:
    if options.variant == "A0" and policy.exploration.billionths:
        raise InputError(
            "exploration", "0 with variant A0, which does not explore", policy.exploration
        )
    if budgets is None:
        return
    if options.variant == "A0":
        raise InputError("budgets", "null with variant A0, whose budget counts slots", "a list")
    if len(budgets) != trace.scores.shape[1]:
        raise InputError(
            "budgets",
            f"one block budget per step ({trace.scores.shape[1]})",
            f"{len(budgets)} entries",
        )


def _records(
    options: SpinOptions,
    inputs: StepInputs,
    plan: StepPlan,
    scores: Tensor,
    accepted: int,
    *,
    with_curve: bool,
) -> list[StepRecord]:
    """Describe a step, one record per layer."""
    num_layers, rows = inputs.query_positions.shape
    picked = dense_top_k(scores.flatten(0, 1), inputs.num_slots.flatten(), options.top_k)
    hits = top_k_per_block(picked, options.block_size)
    misses = miss_rate(hits, plan.shared.repeat_interleave(rows, 0)).view(num_layers, rows)
    curves = miss_curve(hits, plan.rank.flatten(0, 1)).view(num_layers, rows, -1)
    return [
        StepRecord(
            blocks=plan.shared[layer].nonzero()[:, 0].tolist(),
            num_blocks=int(plan.num_blocks[layer].max()),
            budgets=plan.budgets[layer].tolist(),
            misses=misses[layer].tolist(),
            dense=bool(plan.dense[layer]),
            accepted=accepted,
            miss_curve=(
                curves[layer, 0, : int(plan.num_blocks[layer, 0])].tolist() if with_curve else None
            ),
        )
        for layer in range(num_layers)
    ]
