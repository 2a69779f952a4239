"""Plan a step: the blocks that every layer's rows score."""

from spin_kernels.plan_blocks.reference import plan_blocks

__all__ = ["plan_blocks"]
