"""Turn a block mask into an ascending list."""

from spin_kernels.block_list.reference import PAD, block_list, block_slots

__all__ = ["PAD", "block_list", "block_slots"]
