"""Choose the blocks to score: forced, exploited and explored."""

from spin_kernels.block_select.reference import (
    EXPLOIT,
    EXPLORE,
    FORCED,
    INVISIBLE,
    SKIPPED,
    block_rank,
    block_select,
    stable_rank,
)

__all__ = [
    "EXPLOIT",
    "EXPLORE",
    "FORCED",
    "INVISIBLE",
    "SKIPPED",
    "block_rank",
    "block_select",
    "stable_rank",
]
