"""The order in which blocks are explored."""

from spin_kernels.exploration_key.reference import (
    BLOCK_AGE,
    NONE,
    RANDOM,
    STALENESS,
    exploration_key,
    staleness_rank,
)

__all__ = ["BLOCK_AGE", "NONE", "RANDOM", "STALENESS", "exploration_key", "staleness_rank"]
