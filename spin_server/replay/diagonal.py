"""Where the diagonal history of a trace is stored.

D is indexed by the offset q - i, which may be any integer: negative, or far beyond the
context. A trace touches one window of offsets per row, so storage covers the union of those
windows, laid end to end.
"""

import torch
from torch import Tensor


def diagonal_layout(positions: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
    """Place the windows [q - length + 1, q] in one array of offsets.

    Args:
        positions: (int64): [...]; q of each row.
        lengths: (int64): the same shape; visible slots (or blocks), 0 for no window.

    Returns:
        places (int64): the same shape; where offset q is stored, so that offset q - i lies at
        place - i; and the size of the storage.
    """
    ends, starts = positions.flatten(), (positions - lengths + 1).flatten()
    used = lengths.flatten() > 0
    if not used.any():
        return torch.zeros_like(positions), 1
    order = torch.argsort(starts[used])
    first, last = starts[used][order], ends[used][order]
    reach = last.cummax(0).values
    # A new run of storage begins where a window starts past everything before it.
    fresh = torch.ones_like(first, dtype=torch.bool)
    fresh[1:] = first[1:] > reach[:-1]
    run_start = first[fresh]
    run_end = reach[torch.cat([fresh[1:], fresh.new_ones(1)])]
    sizes = run_end - run_start + 1
    base = torch.cumsum(sizes, 0) - sizes
    run = (torch.searchsorted(run_start, ends, right=True) - 1).clamp(min=0)
    places = torch.where(used, base[run] + ends - run_start[run], 0)
    return places.view(positions.shape), int(sizes.sum())
