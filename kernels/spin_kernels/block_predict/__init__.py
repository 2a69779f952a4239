"""Predict block scores from the vertical and diagonal histories."""

from spin_kernels.block_predict.reference import block_predict, slot_predict

__all__ = ["block_predict", "slot_predict"]
