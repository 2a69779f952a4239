"""Score prediction, in plain torch."""

import torch
from torch import Tensor

from spin_kernels.block_pool import block_pool


def slot_predict(
    vertical: Tensor,
    diagonal: Tensor,
    state_rows: Tensor,
    query_positions: Tensor,
    *,
    num_slots: int,
) -> Tensor:
    """Predict the indexer's score of slots 0..num_slots-1: max(V[i], D[q - i]).

    Args:
        vertical: (float32): [states, slots]; V, zero where nothing was observed.
        diagonal: (float32): [states, offsets]; D by distance from the query. An offset outside
            0..offsets-1 was never stored and reads as zero.
        state_rows: (int64): [rows]; the state that each row reads.
        query_positions: (int64): [rows], in slots.
        num_slots: how many slots to predict; slots past V's width read as zero.

    Returns:
        (float32): [rows, num_slots].

    Source: SPIN, equation for the predicted slot score (arXiv 2610.09025).
    """
    slots = torch.arange(num_slots, device=vertical.device)
    v = vertical.new_zeros(len(state_rows), num_slots)
    stored = min(num_slots, vertical.shape[1])
    v[:, :stored] = vertical[state_rows, :stored]

    offsets = query_positions[:, None] - slots  # [rows, num_slots]
    inside = (offsets >= 0) & (offsets < diagonal.shape[1])
    d = diagonal[state_rows[:, None], offsets.where(inside, 0)]
    return torch.maximum(v, d.masked_fill(~inside, 0.0))


def block_predict(
    vertical: Tensor,
    diagonal: Tensor,
    state_rows: Tensor,
    query_positions: Tensor,
    num_slots: Tensor,
    *,
    num_blocks: int,
    block_size: int,
    pooling: str = "max",
) -> Tensor:
    """Predict one score per block: the pooled predicted scores of its visible slots.

    Args:
        vertical, diagonal, state_rows, query_positions: as in `slot_predict`.
        num_slots: (int64): [rows]; slots visible to each row.
        num_blocks: width of the result.
        block_size: slots per block.
        pooling: see `block_pool`.

    Returns:
        [rows, num_blocks]; -inf for a block without a visible slot.

    Source: SPIN, variant A1 (arXiv 2610.09025).
    """
    width = num_blocks * block_size
    predicted = slot_predict(vertical, diagonal, state_rows, query_positions, num_slots=width)
    visible = torch.arange(width, device=vertical.device) < num_slots[:, None]
    shape = (len(state_rows), num_blocks, block_size)
    return block_pool(predicted.view(shape), visible.view(shape), pooling)
