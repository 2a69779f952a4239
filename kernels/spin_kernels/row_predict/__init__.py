"""Predict the block scores of every row of a step, under speculation."""

from spin_kernels.row_predict.reference import row_predict

__all__ = ["row_predict"]
