"""Pool the slots of a block into one number."""

from spin_kernels.block_pool.reference import POOLINGS, block_pool

__all__ = ["POOLINGS", "block_pool"]
