"""The plan of a step with drafts as one Triton kernel: one program per request and layer."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import DraftRows, Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.counter_draw import seed_key
from spin_kernels.plan_blocks.triton import budget_of, choose


# One binary for all layers: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["first_layer"])
def _union_kernel(
    last_observed_ptr,
    steps_ptr,
    slots_ptr,
    policies_ptr,
    request_keys_ptr,
    positions_ptr,
    num_slots_ptr,
    starts_ptr,
    sparsity_ptr,
    exploration_ptr,
    exploration_policy_ptr,
    probe_period_ptr,
    layers_ptr,
    predicted_ptr,
    blocks_ptr,
    counts_ptr,
    lengths_ptr,
    step_numbers_ptr,
    outcomes_ptr,
    first_slots_ptr,
    seed_key,
    first_layer,
    num_states,
    num_policies,
    max_blocks,
    request_capacity,
    row_capacity,
    COMPRESS_RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    DENSE_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW0: tl.constexpr,
):
    request = tl.program_id(0)
    index = first_layer + tl.program_id(1)
    first = tl.load(starts_ptr + request)
    last = tl.load(starts_ptr + request + 1)
    slot = tl.load(slots_ptr + request)
    first_slots = tl.load(num_slots_ptr + first, mask=first < last, other=0)
    longest = tl.load(num_slots_ptr + last - 1, mask=first < last, other=0)
    num_blocks = (longest + BLOCK_SIZE - 1) // BLOCK_SIZE
    place = tl.arange(0, WIDTH)
    visible = place < num_blocks
    selected = visible
    step = tl.full((), -1, tl.int32)
    rows_at = index.to(tl.int64) * row_capacity

    if (slot >= 0) & (first_slots > DENSE_SLOTS):
        state = index.to(tl.int64) * num_states + slot
        policy = tl.load(policies_ptr + request)
        step = tl.load(steps_ptr + state)
        period = tl.load(probe_period_ptr + policy)
        dense = (step == 0) | ((period > 0) & (step % tl.maximum(period, 1) == 0))
        outcomes = outcomes_ptr + (index * num_policies + policy) * 5
        if dense:
            tl.atomic_add(outcomes + 4, num_blocks.to(tl.int64))
        else:
            sparsity = tl.load(sparsity_ptr + policy)
            share = tl.load(exploration_ptr + policy)
            kind = tl.load(exploration_policy_ptr + policy)
            request_key = tl.load(request_keys_ptr + request)
            # All rows draw alike, or their union would eat the sparsity.
            position = tl.load(positions_ptr + request) // COMPRESS_RATIO
            layer = tl.load(layers_ptr + index)
            last_observed = last_observed_ptr + state * max_blocks
            forced = place < 0
            exploited = place < 0
            selected = place < 0
            for row in range(first, last):
                num_slots = tl.load(num_slots_ptr + row)
                row_blocks = (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE
                newest = row_blocks - 1
                forced |= (place < row_blocks) & ((place == 0) | (place == newest))
                if (row == first) | (ROW0 == 0):
                    budget, explored, _ = budget_of(
                        row_blocks, sparsity, share, kind, TOP_K, BLOCK_SIZE
                    )
                    predicted = predicted_ptr + (rows_at + row) * max_blocks
                    scores = tl.load(predicted + place, mask=place < row_blocks, other=0.0)
                    own_exploited, own = choose(
                        scores,
                        place,
                        row_blocks,
                        budget,
                        explored,
                        kind,
                        tl.load(predicted + newest),
                        predicted,
                        predicted,
                        last_observed,
                        request_key,
                        seed_key,
                        position,
                        layer,
                        WIDTH,
                        CHUNK,
                    )
                    exploited |= own_exploited
                    selected |= own
            selected |= forced
            num_forced = tl.sum(forced.to(tl.int32))
            num_exploited = tl.sum((exploited & (forced == 0)).to(tl.int32))
            num_selected = tl.sum(selected.to(tl.int32))
            tl.atomic_add(outcomes + 0, num_exploited.to(tl.int64))
            tl.atomic_add(outcomes + 1, (num_selected - num_exploited - num_forced).to(tl.int64))
            tl.atomic_add(outcomes + 2, num_forced.to(tl.int64))
            tl.atomic_add(outcomes + 3, (num_blocks - num_selected).to(tl.int64))
        tl.store(steps_ptr + state, step + 1)

    out = index.to(tl.int64) * request_capacity + request
    order = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(blocks_ptr + out * max_blocks + order, place, mask=selected)
    tl.store(counts_ptr + out, tl.sum(selected.to(tl.int32)))
    tl.store(step_numbers_ptr + out, step)
    tl.store(first_slots_ptr + out, first_slots)
    for row in range(first, last):
        num_slots = tl.load(num_slots_ptr + row)
        seen = tl.minimum(tl.maximum(num_slots - place * BLOCK_SIZE, 0), BLOCK_SIZE)
        tl.store(lengths_ptr + rows_at + row, tl.sum(tl.where(selected, seen, 0)))


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
    """See `spin_kernels.plan_union.reference`; the same choice."""
    max_blocks = predicted.shape[2]
    _union_kernel[(num_requests, num_layers)](
        histories.last_observed,
        histories.steps,
        rows.slots,
        rows.policies,
        rows.keys,
        rows.positions,
        rows.num_slots,
        drafts.starts,
        policies.sparsity,
        policies.exploration,
        policies.exploration_policy,
        policies.probe_period,
        layers,
        predicted,
        plan.blocks,
        plan.counts,
        plan.lengths,
        plan.step_numbers,
        plan.outcomes,
        first_slots,
        seed_key(seed),
        first_layer,
        histories.num_states,
        plan.outcomes.shape[1],
        max_blocks,
        plan.counts.shape[1],
        plan.lengths.shape[1],
        COMPRESS_RATIO=compress_ratio,
        TOP_K=top_k,
        DENSE_SLOTS=dense_slots,
        BLOCK_SIZE=block_size,
        WIDTH=max(triton.next_power_of_2(max_blocks), 16),
        CHUNK=4,
        ROW0=row0,
        num_warps=8,
    )
