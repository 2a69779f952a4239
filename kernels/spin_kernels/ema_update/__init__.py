"""Fold the indexer's scores of the scored blocks into the histories."""

from spin_kernels.ema_update.reference import ema_update

__all__ = ["ema_update"]
