"""How many blocks a row may keep, and how many of them it explores.

Shares are integers over a billion: in floating point, ceil((1 - 0.7) * 10) is 4.
"""

import torch
from torch import Tensor

BILLION = 1_000_000_000


def ceil_div(numerator: Tensor, denominator: int) -> Tensor:
    """Divide int64 tensors, rounding up."""
    return -torch.div(-numerator, denominator, rounding_mode="floor")


def keep_count(total: Tensor, sparsity: Tensor) -> Tensor:
    """ceil((1 - sparsity) * total).

    Args:
        total: (int64): [rows], blocks or slots; below 2**33, or the product overflows.
        sparsity: (int64): [rows], billionths.
    """
    return ceil_div((BILLION - sparsity) * total, BILLION)


def num_forced(num_blocks: Tensor) -> Tensor:
    """Count the forced blocks, the sink and the newest: two, or one where they coincide."""
    return num_blocks.clamp(max=2)


def block_budget(num_blocks: Tensor, wanted: Tensor, *, top_k: int, block_size: int) -> Tensor:
    """m = min(B, max(ceil(K/b), wanted)), and at least the forced blocks.

    Args:
        num_blocks: (int64): [rows]; B.
        wanted: (int64): [rows]; ceil((1 - sparsity) * B), or a per-layer budget.
        top_k, block_size: K and b.

    Returns:
        (int64): [rows].

    Source: SPIN, budget (arXiv 2610.09025); the lower bound lets the indexer fill its top-K.
    """
    floor = -(-top_k // block_size)
    return torch.maximum(torch.minimum(num_blocks, wanted.clamp(min=floor)), num_forced(num_blocks))


def num_explored(budgets: Tensor, num_blocks: Tensor, exploration: Tensor) -> Tensor:
    """e = 0 without exploration, else max(1, floor(share * m)), at most m - forced.

    Blocks not selected yet never bind: B - (m - e) is at least e, because m is at most B.

    Args:
        budgets: (int64): [rows]; m.
        num_blocks: (int64): [rows]; B.
        exploration: (int64): [rows], billionths.
    """
    share = torch.div(exploration * budgets, BILLION, rounding_mode="floor").clamp(min=1)
    free = budgets - num_forced(num_blocks)
    return torch.minimum(share, free).where(exploration > 0, 0)
