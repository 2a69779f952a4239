"""Block lists, in plain torch."""

import torch
from torch import Tensor

PAD = -1


def block_list(mask: Tensor) -> tuple[Tensor, Tensor]:
    """List the set blocks of each row in ascending order.

    Args:
        mask: (bool): [rows, width].

    Returns:
        blocks (int32): [rows, width], padded with -1; counts (int32): [rows].
    """
    order = torch.argsort((~mask).to(torch.int8), dim=-1, stable=True)
    counts = mask.sum(-1)
    listed = torch.arange(mask.shape[-1], device=mask.device) < counts[:, None]
    blocks = order.where(listed, PAD).to(torch.int32)
    return blocks, counts.to(torch.int32)


def block_slots(blocks: Tensor, num_slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Give the logical slot behind every column of a compact row.

    Args:
        blocks: (int32): [rows, width]; a block list, padded with -1.
        num_slots: (int64): [rows]; slots visible to each row.
        block_size: slots per block.

    Returns:
        slots (int64): [rows, width * block_size], 0 where nothing is visible;
        visible (bool): the same shape.
    """
    inner = torch.arange(block_size, device=blocks.device)
    slots = (blocks.long()[:, :, None] * block_size + inner).flatten(1)
    visible = (blocks >= 0).repeat_interleave(block_size, dim=1) & (slots < num_slots[:, None])
    return slots.where(visible, 0), visible
