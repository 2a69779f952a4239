"""Block selection, in plain torch."""

import torch
from torch import Tensor

# What became of a block in one row's selection (int8).
INVISIBLE, SKIPPED, EXPLOIT, EXPLORE, FORCED = -1, 0, 1, 2, 3

_NEVER = torch.iinfo(torch.int64).max


def stable_rank(keys: Tensor, *, descending: bool = False) -> Tensor:
    """Give each entry its place in the sorted row; equal entries keep their order.

    Args:
        keys: [rows, width]; no NaN. -0.0 equals 0.0.
        descending: largest first.

    Returns:
        (int64): [rows, width]; a permutation of 0..width-1 in every row.
    """
    # Adding zero turns -0.0 into 0.0: a radix sort would tell the two apart.
    order = torch.argsort(keys + 0, dim=-1, descending=descending, stable=True)
    places = torch.arange(keys.shape[-1], device=keys.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def block_rank(block_scores: Tensor, num_blocks: Tensor) -> Tensor:
    """Rank blocks as SPIN takes them: forced first, then by predicted score, then by index.

    The forced blocks are the sink (0) and the newest (num_blocks - 1).

    Args:
        block_scores: (float): [rows, width]; finite for visible blocks.
        num_blocks: (int64): [rows]; visible blocks.

    Returns:
        (int64): [rows, width]; invisible blocks last.
    """
    index = torch.arange(block_scores.shape[-1], device=block_scores.device)
    newest = num_blocks[:, None] - 1
    keys = block_scores.masked_fill(index > newest, -torch.inf)
    return stable_rank(
        keys.masked_fill_((index == newest) | (index == 0), torch.inf), descending=True
    )


def block_select(
    rank: Tensor,
    num_blocks: Tensor,
    budgets: Tensor,
    num_explored: Tensor,
    exploration_keys: Tensor,
) -> Tensor:
    """Choose `budgets` blocks per row, `num_explored` of them by the exploration keys.

    Exploitation takes budgets - num_explored blocks in the order of their rank. Exploration
    then takes, of the visible blocks left, those with the smallest keys; ties go to the lower
    index.

    Args:
        rank: (int64): [rows, width]; from `block_rank`.
        num_blocks: (int64): [rows]; visible blocks.
        budgets: (int64): [rows]; blocks to keep, from the number of forced ones to num_blocks.
        num_explored: (int64): [rows]; at most budgets minus the number of forced blocks.
        exploration_keys: (int64): [rows, width]; smaller is explored first.

    Returns:
        (int8): [rows, width]; FORCED, EXPLOIT, EXPLORE or SKIPPED, and INVISIBLE past the end.

    Source: SPIN, block selection with exploration (arXiv 2610.09025).
    """
    # The order of the rank is: forced, exploited, candidates for exploration, invisible.
    exploited = rank < (budgets - num_explored)[:, None]
    visible = rank < num_blocks[:, None]
    forced = rank < num_blocks.clamp(max=2)[:, None]
    closed = exploited | ~visible
    explored_rank = stable_rank(exploration_keys.masked_fill(closed, _NEVER))
    explored = (explored_rank < num_explored[:, None]) & ~closed

    outcomes = torch.full(rank.shape, SKIPPED, dtype=torch.int8, device=rank.device)
    outcomes.masked_fill_(exploited, EXPLOIT).masked_fill_(explored, EXPLORE)
    return outcomes.masked_fill_(forced, FORCED).masked_fill_(~visible, INVISIBLE)
