"""Drafts' scores put aside, in plain torch."""

from torch import Tensor

from spin_kernels.arguments import DraftRows, Rows, Stash, StepPlan


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
    """Copy a layer's scores of every row but each request's first, and note whose they are.

    Args:
        stash: written for one layer, of requests that are not of this step too: nothing waits there
            any longer.
        rows: of the step: `positions` are those of each request's first row, `num_slots` all rows'.
        drafts: which rows are whose.
        plan: of the step.
        layer_index: 0..L-1.
        scores: (float): [T, at least the longest compact length].
        num_requests: of this step.
        block_size: slots per block.

    Source: SPIN, speculative decoding: updates wait for the verdict (arXiv 2610.09025).
    """
    starts = drafts.starts.tolist()
    stash.step_numbers[layer_index] = -1
    stash.fresh[:] = False
    for request in range(num_requests):
        step = int(plan.step_numbers[layer_index, request])
        if step < 0:
            continue
        stash.step_numbers[layer_index, request] = step
        stash.fresh[request] = True
        stash.slots[layer_index, request] = rows.slots[request]
        stash.policies[layer_index, request] = rows.policies[request]
        width = min(int(plan.counts[layer_index, request]) * block_size, scores.shape[1])
        for draft, row in enumerate(range(starts[request] + 1, starts[request + 1])):
            stash.positions[layer_index, draft, request] = rows.positions[request] + draft + 1
            stash.num_slots[layer_index, draft, request] = rows.num_slots[row]
            length = min(width, int(plan.lengths[layer_index, row]))
            stash.scores[layer_index, request, draft, :length] = scores[row, :length]
