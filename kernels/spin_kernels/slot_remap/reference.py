"""Compact indices back to slots, in plain torch."""

import torch
from torch import Tensor


def slot_remap(
    indices: Tensor, blocks: Tensor, *, block_size: int, owners: Tensor | None = None
) -> None:
    """Turn indices into a compact row into the request's own slots, in place; -1 stays.

    Args:
        indices: (int32): [rows, k]; may be strided.
        blocks: (int32): [lists, width]; the listed blocks, in order.
        block_size: slots per block.
        owners: (int32): [rows]; whose list each row takes; its own, unless they are given.
    """
    if owners is not None:
        blocks = blocks[owners[: len(indices)].long()]
    place = indices.clamp(min=0).long()
    slots = blocks.gather(1, place // block_size) * block_size + (place % block_size)
    indices.copy_(torch.where(indices < 0, -1, slots))
