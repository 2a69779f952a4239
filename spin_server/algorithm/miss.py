"""What a selection misses, measured against the dense indexer."""

import torch
from torch import Tensor

from spin_kernels.block_select import stable_rank


def dense_top_k(scores: Tensor, num_slots: Tensor, top_k: int) -> Tensor:
    """Mark the slots that the dense indexer would pick; ties go to the lower slot.

    Args:
        scores: (float32): [rows, slots]; NaN and infinities are never picked.
        num_slots: (int64): [rows]; visible slots.
        top_k: K.

    Returns:
        (bool): [rows, slots]; min(K, finite visible slots) are set in each row.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    candidates = (slots < num_slots[:, None]) & scores.isfinite()
    rank = stable_rank(scores.masked_fill(~candidates, -torch.inf), descending=True)
    return candidates & (rank < top_k)


def top_k_per_block(picked: Tensor, block_size: int) -> Tensor:
    """Count the picked slots of each block.

    Args:
        picked: (bool): [rows, slots].

    Returns:
        (int64): [rows, ceil(slots / block_size)].
    """
    missing = -picked.shape[-1] % block_size
    padded = torch.nn.functional.pad(picked, (0, missing))
    return padded.view(len(padded), -1, block_size).sum(-1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole.clamp(min=1), 0.0)


def miss_rate(hits: Tensor, scored: Tensor) -> Tensor:
    """Share of the dense top-K that lies in blocks that were not scored.

    Args:
        hits: (int64): [rows, blocks]; from `top_k_per_block`.
        scored: (bool): [rows, blocks].

    Returns:
        (float64): [rows]; 0 where the indexer found nothing.
    """
    return _share((hits * ~scored).sum(-1), hits.sum(-1))


def miss_curve(hits: Tensor, rank: Tensor) -> Tensor:
    """Miss rate at every budget, had the blocks been taken in the order of `rank`.

    Args:
        hits: (int64): [rows, blocks]; from `top_k_per_block`.
        rank: (int64): [rows, blocks]; from `block_rank`.

    Returns:
        (float64): [rows, blocks]; entry m - 1 belongs to a budget of m blocks.

    Source: SPIN, dense probe steps (arXiv 2610.09025).
    """
    by_rank = torch.zeros_like(hits).scatter_(-1, rank, hits)
    missed = hits.sum(-1, keepdim=True) - by_rank.cumsum(-1)
    return _share(missed, hits.sum(-1, keepdim=True))
