"""Take the maxima of the diagonal history where a query moved."""

from spin_kernels.window_max.reference import window_max

__all__ = ["window_max"]
