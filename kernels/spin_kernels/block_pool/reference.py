"""Block pooling, in plain torch."""

import torch
from torch import Tensor

POOLINGS = ("max", "top4", "mean")
_TOP = 4


def block_pool(values: Tensor, present: Tensor, pooling: str) -> Tensor:
    """Pool the last dimension, over the entries that are present.

    Args:
        values: (float32): [..., block_size]; finite wherever present.
        present: (bool): [..., block_size]; False where a slot is not visible or not finite.
        pooling: `max`, `top4` (mean of the up to four largest) or `mean`.

    Returns:
        [...]: float32 for `max`, float64 for the two means, whose order of summation would
        otherwise decide near-ties; -inf where nothing is present.

    Raises:
        ValueError: an unknown pooling.

    Source: SPIN, pooling variants (arXiv 2610.09025).
    """
    if pooling == "max":
        return values.masked_fill(~present, -torch.inf).amax(-1)
    count = present.sum(-1)
    if pooling == "mean":
        total = values.masked_fill(~present, 0.0).double().sum(-1)
    elif pooling == "top4":
        count = count.clamp(max=_TOP)
        top = values.masked_fill(~present, -torch.inf).topk(min(_TOP, values.shape[-1])).values
        total = top.masked_fill(top == -torch.inf, 0.0).double().sum(-1)
    else:
        raise ValueError(f"pooling: expected one of {', '.join(POOLINGS)}, got {pooling!r}")
    return torch.where(count > 0, total / count.clamp(min=1), -torch.inf)
