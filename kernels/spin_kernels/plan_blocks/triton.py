"""Block planning as one Triton kernel: one program per row and layer."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.block_budget import BILLION
from spin_kernels.counter_draw import seed_key
from spin_kernels.exploration_key import BLOCK_AGE, NONE, RANDOM

_BILLION = tl.constexpr(BILLION)
_RANDOM, _BLOCK_AGE, _NONE = tl.constexpr(RANDOM), tl.constexpr(BLOCK_AGE), tl.constexpr(NONE)


@triton.jit
def _ordered(values):
    """Map float32 to uint32 so that the order stays and -0.0 equals 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _largest(keys, among, count):
    """Mark the `count` (1 or more) largest keys among the marked; ties go to the lower place.

    The threshold is found two bits at a time, without a sort: one sum counts for three candidates.
    """
    threshold = tl.zeros((), tl.uint32)
    for step in range(16):
        bit = tl.full((), 1, tl.uint32) << (30 - 2 * step)
        one, two, three = threshold + bit, threshold + 2 * bit, threshold + 3 * bit
        counts = (among & (keys >= one)).to(tl.int64)
        counts += (among & (keys >= two)).to(tl.int64) << 21
        counts += (among & (keys >= three)).to(tl.int64) << 42
        found = tl.sum(counts)
        threshold = tl.where((found & 0x1FFFFF) >= count, one, threshold)
        threshold = tl.where(((found >> 21) & 0x1FFFFF) >= count, two, threshold)
        threshold = tl.where((found >> 42) >= count, three, threshold)
    above = among & (keys > threshold)
    ties = among & (keys == threshold)
    missing = count - tl.sum(above.to(tl.int32))
    return above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= missing))


@triton.jit
def budget_of(num_blocks, sparsity, share, kind, TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Blocks that a row keeps, and how many of them it explores and must take: exact integers."""
    wanted = ((_BILLION - sparsity) * num_blocks + _BILLION - 1) // _BILLION
    budget = tl.minimum(tl.maximum(wanted, (TOP_K + BLOCK_SIZE - 1) // BLOCK_SIZE), num_blocks)
    num_forced = tl.minimum(num_blocks, 2)
    budget = tl.maximum(budget, num_forced).to(tl.int32)
    explored = tl.maximum(share * budget // _BILLION, 1).to(tl.int32)
    explored = tl.minimum(explored, budget - num_forced)
    explored = tl.where((share > 0) & (kind != _NONE), explored, 0)
    return budget, explored, num_forced


@triton.jit
def choose(
    scores,
    place,
    num_blocks,
    budget,
    explored,
    kind,
    top,
    vertical_max,
    diagonal_max,
    last_observed,
    request_key,
    seed_key,
    position,
    layer,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Mark what a row exploits, and what it scores.

    Scores are the larger of `vertical_max` and `diagonal_max`, but `top` for the newest block.
    """
    visible, newest = place < num_blocks, num_blocks - 1
    forced = visible & ((place == 0) | (place == newest))
    keys = tl.where(forced, 0xFFFFFFFF, _ordered(scores)).to(tl.uint32)
    exploited = _largest(keys, visible, budget - explored)
    selected = exploited
    if explored > 0:
        candidates = visible & (exploited == 0)
        seen = tl.load(last_observed + place, mask=visible, other=-1)
        if kind == _RANDOM:
            zero = tl.zeros((WIDTH,), tl.uint32)
            words, _, _, _ = tl.philox(
                request_key ^ seed_key,
                place.to(tl.uint32),
                zero + (position & 0xFFFFFFFF).to(tl.uint32),
                zero + layer.to(tl.uint32),
                zero + (position >> 32).to(tl.uint32),
            )
            wanted_keys = tl.full((WIDTH,), 0xFFFFFFFF, tl.uint32) - words
        elif kind == _BLOCK_AGE:
            wanted_keys = (0x7FFFFFFF - seen).to(tl.uint32)
        else:
            # Blocks that are younger, and blocks that score lower, counted pair by pair.
            own = _ordered(scores)
            ranks = tl.zeros((WIDTH,), tl.int32)
            for start in range(0, num_blocks, CHUNK):
                other = start + tl.arange(0, CHUNK)
                there = other < num_blocks
                age = tl.load(last_observed + other, mask=there, other=-1)
                score = tl.maximum(
                    tl.load(vertical_max + other, mask=there, other=0.0),
                    tl.load(diagonal_max + other, mask=there, other=0.0),
                )
                score = _ordered(tl.where(other == newest, top, score))
                younger = there[None, :] & (age[None, :] > seen[:, None])
                lower = there[None, :] & (score[None, :] < own[:, None])
                ranks += tl.sum(younger.to(tl.int32) + lower.to(tl.int32), 1)
            wanted_keys = ranks.to(tl.uint32)
        extra = _largest(wanted_keys, candidates, explored)
        selected = exploited | extra
    return exploited, selected


# One binary for all layers: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["first_layer"])
def _plan_kernel(
    vertical_ptr,
    diagonal_ptr,
    vertical_max_ptr,
    diagonal_max_ptr,
    last_observed_ptr,
    steps_ptr,
    slots_ptr,
    policies_ptr,
    request_keys_ptr,
    positions_ptr,
    num_slots_ptr,
    sparsity_ptr,
    exploration_ptr,
    exploration_policy_ptr,
    probe_period_ptr,
    layers_ptr,
    blocks_ptr,
    counts_ptr,
    lengths_ptr,
    step_numbers_ptr,
    outcomes_ptr,
    diagonal_at_ptr,
    seed_key,
    first_layer,
    num_states,
    num_policies,
    max_slots,
    num_offsets,
    max_blocks,
    row_capacity,
    COMPRESS_RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    DENSE_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    index = first_layer + tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    num_slots = tl.load(num_slots_ptr + row).to(tl.int64)
    num_blocks = ((num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE).to(tl.int32)
    place = tl.arange(0, WIDTH)
    visible = place < num_blocks
    newest = num_blocks - 1
    selected = visible
    step = tl.full((), -1, tl.int32)

    if (slot >= 0) & (num_slots > DENSE_SLOTS):
        state = index.to(tl.int64) * num_states + slot
        policy = tl.load(policies_ptr + row)
        step = tl.load(steps_ptr + state)
        period = tl.load(probe_period_ptr + policy)
        dense = (step == 0) | ((period > 0) & (step % tl.maximum(period, 1) == 0))
        outcomes = outcomes_ptr + (index * num_policies + policy) * 5
        if dense:
            tl.atomic_add(outcomes + 4, num_blocks.to(tl.int64))
        else:
            kind = tl.load(exploration_policy_ptr + policy)
            budget, explored, num_forced = budget_of(
                num_blocks,
                tl.load(sparsity_ptr + policy),
                tl.load(exploration_ptr + policy),
                kind,
                TOP_K,
                BLOCK_SIZE,
            )
            vertical_max = vertical_max_ptr + state * max_blocks
            diagonal_max = diagonal_max_ptr + state * max_blocks
            scores = tl.maximum(
                tl.load(vertical_max + place, mask=visible, other=0.0),
                tl.load(diagonal_max + place, mask=visible, other=0.0),
            )
            # A slot may have become visible since the newest block's maxima were taken.
            position = tl.load(positions_ptr + row) // COMPRESS_RATIO
            last = newest.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
            offsets = position - last
            v = tl.load(vertical_ptr + state * max_slots + last, mask=last < num_slots, other=0.0)
            d = tl.load(
                diagonal_ptr + state * num_offsets + offsets,
                mask=(last < num_slots) & (offsets >= 0) & (offsets < num_offsets),
                other=0.0,
            )
            latest = tl.maximum(v.to(tl.float32), d.to(tl.float32))
            top = tl.max(tl.where(last < num_slots, latest, -float("inf")))
            _, selected = choose(
                tl.where(place == newest, top, scores),
                place,
                num_blocks,
                budget,
                explored,
                kind,
                top,
                vertical_max,
                diagonal_max,
                last_observed_ptr + state * max_blocks,
                tl.load(request_keys_ptr + row),
                seed_key,
                position,
                tl.load(layers_ptr + index),
                WIDTH,
                CHUNK,
            )
            tl.atomic_add(outcomes + 0, (budget - explored - num_forced).to(tl.int64))
            tl.atomic_add(outcomes + 1, explored.to(tl.int64))
            tl.atomic_add(outcomes + 2, num_forced.to(tl.int64))
            tl.atomic_add(outcomes + 3, (num_blocks - budget).to(tl.int64))
        tl.store(steps_ptr + state, step + 1)
        tl.store(diagonal_at_ptr + state, tl.load(positions_ptr + row) // COMPRESS_RATIO)

    out = index * row_capacity + row
    count = tl.sum(selected.to(tl.int32))
    order = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(blocks_ptr + out.to(tl.int64) * max_blocks + order, place, mask=selected)
    tl.store(counts_ptr + out, count)
    tl.store(step_numbers_ptr + out, step)
    length = (count - 1) * BLOCK_SIZE + (num_slots - newest.to(tl.int64) * BLOCK_SIZE)
    tl.store(lengths_ptr + out, tl.where(num_slots > 0, length, 0).to(tl.int32))


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
    """See `spin_kernels.plan_blocks.reference`; bit for bit the same choice."""
    max_blocks = histories.vertical_max.shape[1]
    width = max(triton.next_power_of_2(max_blocks), 16)
    _plan_kernel[(num_rows, num_layers)](
        histories.vertical,
        histories.diagonal,
        histories.vertical_max,
        histories.diagonal_max,
        histories.last_observed,
        histories.steps,
        rows.slots,
        rows.policies,
        rows.keys,
        rows.positions,
        rows.num_slots,
        policies.sparsity,
        policies.exploration,
        policies.exploration_policy,
        policies.probe_period,
        layers,
        plan.blocks,
        plan.counts,
        plan.lengths,
        plan.step_numbers,
        plan.outcomes,
        histories.diagonal_at,
        seed_key(seed),
        first_layer,
        histories.num_states,
        plan.outcomes.shape[1],
        histories.vertical.shape[1],
        histories.diagonal.shape[1],
        max_blocks,
        plan.counts.shape[1],
        COMPRESS_RATIO=compress_ratio,
        TOP_K=top_k,
        DENSE_SLOTS=dense_slots,
        BLOCK_SIZE=block_size,
        WIDTH=width,
        CHUNK=4,
        num_warps=8,
    )
