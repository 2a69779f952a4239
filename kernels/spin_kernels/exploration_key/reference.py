"""The order in which blocks outside the top-ranked set are explored.

Each policy gives an int64 key per block; `block_select` takes the smallest, ties to the lower
index.
"""

import torch
from torch import Tensor

from spin_kernels.counter_draw import counter_draw

# Which blocks a row explores.
RANDOM, BLOCK_AGE, STALENESS, NONE = range(4)


def _count_below(keys: Tensor, visible: Tensor) -> Tensor:
    """Count, for each visible entry, the visible entries strictly below it: [rows, width]."""
    ordered, order = torch.sort(keys + 0, dim=-1)
    # Invisible entries sit at one end or the other: they are subtracted, wherever they are.
    below = torch.searchsorted(ordered, keys + 0)
    hidden = (~visible).gather(-1, order).long()
    hidden_before = torch.nn.functional.pad(hidden.cumsum(-1), (1, 0))
    return below - hidden_before.gather(-1, below)


def staleness_rank(block_scores: Tensor, last_observed: Tensor, visible: Tensor) -> Tensor:
    """Sum the age rank and the score rank of each block, in places.

    The paper names this policy and does not define it; this is our reading. A rank is the number
    of visible blocks that are strictly younger, or strictly lower scored. Both ranks have the
    same range, so their sum orders blocks as the sum of the normalised ranks does.

    Args:
        block_scores: (float): [rows, width]; finite where visible.
        last_observed: (int64): [rows, width]; step of the last observation, -1 for never.
        visible: (bool): [rows, width].

    Returns:
        (int64): [rows, width]; the stalest and most promising block has the largest.
    """
    return _count_below(-last_observed, visible) + _count_below(block_scores, visible)


def exploration_key(
    policy: Tensor,
    block_scores: Tensor,
    last_observed: Tensor,
    visible: Tensor,
    *,
    request_keys: Tensor,
    query_positions: Tensor,
    layers: Tensor,
    seed: int,
) -> Tensor:
    """Give each row the exploration keys of its policy.

    Args:
        policy: (int64): [rows]; RANDOM, BLOCK_AGE, STALENESS or NONE.
        block_scores, last_observed, visible: as in `staleness_rank`.
        request_keys, query_positions, layers, seed: as in `counter_draw`.

    Returns:
        (int64): [rows, width]; smaller is explored first.
    """
    keys = torch.zeros(block_scores.shape, dtype=torch.int64, device=block_scores.device)
    for kind in sorted(set(policy.tolist())):
        rows = (policy == kind).nonzero()[:, 0]
        if kind == RANDOM:
            keys[rows] = counter_draw(
                request_keys[rows],
                query_positions[rows],
                layers[rows],
                num_blocks=keys.shape[1],
                seed=seed,
            )
        elif kind == BLOCK_AGE:
            keys[rows] = last_observed[rows]
        elif kind == STALENESS:
            keys[rows] = -staleness_rank(block_scores[rows], last_observed[rows], visible[rows])
    return keys
