"""Turn compact indices back into slots."""

from spin_kernels.slot_remap.reference import slot_remap

__all__ = ["slot_remap"]
