"""Drafts' scores put aside, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from spin_kernels.arguments import DraftRows, Rows, Stash, StepPlan

_WIDTH = 4096
_PROGRAMS = 132 * 4


# One binary for all layers and batches: a graph is captured layer by layer, and must not compile.
@triton.jit(do_not_specialize=["num_requests", "scores_stride"])
def _stash_kernel(
    scores_ptr,
    scores_stride,
    slots_ptr,
    policies_ptr,
    positions_ptr,
    num_slots_ptr,
    starts_ptr,
    step_numbers_ptr,
    lengths_ptr,
    kept_scores_ptr,
    kept_slots_ptr,
    kept_policies_ptr,
    kept_positions_ptr,
    kept_num_slots_ptr,
    kept_steps_ptr,
    fresh_ptr,
    num_requests,
    request_capacity,
    num_drafts,
    max_slots,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    step = tl.load(step_numbers_ptr + request, mask=request < num_requests, other=-1)
    if tl.program_id(1) == 0:
        tl.store(kept_steps_ptr + request, step)
        tl.store(fresh_ptr + request, (step >= 0).to(tl.int1))
    if step >= 0:
        first = tl.load(starts_ptr + request)
        last = tl.load(starts_ptr + request + 1)
        if tl.program_id(1) == 0:
            tl.store(kept_slots_ptr + request, tl.load(slots_ptr + request))
            tl.store(kept_policies_ptr + request, tl.load(policies_ptr + request))
        for row in range(first + 1, last):
            draft = row - first - 1
            if tl.program_id(1) == 0:
                at = draft * request_capacity + request
                tl.store(kept_positions_ptr + at, tl.load(positions_ptr + request) + draft + 1)
                tl.store(kept_num_slots_ptr + at, tl.load(num_slots_ptr + row))
            length = tl.load(lengths_ptr + row)
            kept = kept_scores_ptr + (request.to(tl.int64) * num_drafts + draft) * max_slots
            source = scores_ptr + tl.cast(row, tl.int64) * scores_stride
            for start in range(tl.program_id(1) * WIDTH, length, tl.num_programs(1) * WIDTH):
                column = start + tl.arange(0, WIDTH)
                score = tl.load(source + column, mask=column < length)
                tl.store(kept + column, score, mask=column < length)


def draft_stash(
    stash: Stash,
    rows: Rows,
    drafts: DraftRows,
    plan: StepPlan,
    layer_index: int,
    scores: Tensor,
    *,
    num_requests: int,
    block_size: int,
) -> None:
    """See `spin_kernels.draft_stash.reference`."""
    del block_size  # the rows' lengths say how far scores go
    _, capacity, num_drafts, max_slots = stash.scores.shape
    programs = max(1, min(triton.cdiv(max_slots, _WIDTH), triton.cdiv(_PROGRAMS, num_requests)))
    _stash_kernel[(capacity, programs)](
        scores,
        scores.stride(0),
        rows.slots,
        rows.policies,
        rows.positions,
        rows.num_slots,
        drafts.starts,
        plan.step_numbers[layer_index],
        plan.lengths[layer_index],
        stash.scores[layer_index],
        stash.slots[layer_index],
        stash.policies[layer_index],
        stash.positions[layer_index],
        stash.num_slots[layer_index],
        stash.step_numbers[layer_index],
        stash.fresh,
        num_requests,
        capacity,
        num_drafts,
        max_slots,
        WIDTH=_WIDTH,
        num_warps=4,
    )
