"""What the bound scores: as many blocks as SPIN would, evenly spread, with none of SPIN's work."""

import torch
from torch import Tensor

from spin_kernels.block_budget import block_budget, ceil_div, keep_count
from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.settings import PolicySettings
from spin_server.policy.policy import Policy


def policy_of(sparsity: str, exploration: str) -> Policy:
    """A policy of two shares; the rest is the default."""
    return PolicySettings(sparsity=sparsity, exploration=exploration).policy()


def spread_blocks(num_slots: int, sparsity: int, options: SpinOptions) -> tuple[Tensor, int]:
    """Spread the kept blocks over a context, the first and the newest among them.

    Args:
        num_slots: visible ones.
        sparsity: billionths.
        options: SPIN's block size and top-K.

    Returns:
        (int64): [kept], ascending; and how many slots these blocks hold.
    """
    num_blocks = ceil_div(torch.tensor([num_slots]), options.block_size)
    wanted = keep_count(num_blocks, torch.tensor([sparsity]))
    kept = block_budget(num_blocks, wanted, top_k=options.top_k, block_size=options.block_size)
    blocks = torch.linspace(0, int(num_blocks) - 1, int(kept)).round().long()
    return blocks, num_slots - int(num_blocks - kept) * options.block_size
