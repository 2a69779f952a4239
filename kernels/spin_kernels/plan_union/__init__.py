"""Choose the blocks that the rows of a request share, under speculation."""

from spin_kernels.plan_union.reference import plan_union

__all__ = ["plan_union"]
