"""Budgets in blocks, exactly."""

from spin_kernels.block_budget.reference import (
    BILLION,
    block_budget,
    ceil_div,
    keep_count,
    num_explored,
    num_forced,
)

__all__ = ["BILLION", "block_budget", "ceil_div", "keep_count", "num_explored", "num_forced"]
