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
        vertical: (float): [states, slots]; V, zero where nothing was observed.
        diagonal: (float): [states, offsets]; D by distance from the query. An offset outside
            0..offsets-1 was never stored and reads as zero.
        state_rows: (int64): [rows]; the state that each row reads.
        query_positions: (int64): [rows], in slots.
        num_slots: how many slots to predict; slots past V's width read as zero.

    Returns:
        (float32): [rows, num_slots].

    Source: SPIN, equation for the predicted slot score (arXiv 2610.09025).
    """
    v = vertical.new_zeros(len(state_rows), num_slots, dtype=torch.float32)
    d = diagonal.new_zeros(len(state_rows), num_slots, dtype=torch.float32)
    stored = min(num_slots, vertical.shape[1])
    for row, (state, q) in enumerate(
        zip(state_rows.tolist(), query_positions.tolist(), strict=True)
    ):
        v[row, :stored] = vertical[state, :stored]
        # Slot i lies at offset q - i: the offsets run backwards, from q - num_slots + 1 up to q.
        first, last = max(q - num_slots + 1, 0), min(q, diagonal.shape[1] - 1)
        if first <= last:
            d[row, q - last : q - first + 1] = diagonal[state, first : last + 1].flip(0)
    return torch.maximum(v, d)


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
