"""Draw counter-based random words, equal on every rank and in every replay."""

from spin_kernels.counter_draw.reference import counter_draw, seed_key

__all__ = ["counter_draw", "seed_key"]
