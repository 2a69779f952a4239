"""Fold a layer's scores into its histories."""

from spin_kernels.history_update.reference import history_update

__all__ = ["history_update"]
