"""The update of both moving averages, in plain torch."""

import torch
from torch import Tensor


def ema_update(
    vertical: Tensor,
    diagonal: Tensor,
    state_rows: Tensor,
    query_positions: Tensor,
    num_slots: Tensor,
    scores: Tensor,
    blocks: Tensor,
    decay: Tensor,
    gain: Tensor,
    *,
    block_size: int,
) -> Tensor:
    """Update V[i] and D[q - i] in place for every slot that was scored.

    V[i] becomes decay * V[i] + gain * z[i], each operation rounded to float32 and the result to
    V's own type, and D likewise.
    A score that is NaN or infinite is not an observation. Skipped blocks keep their history.

    Args:
        vertical: (float): [states, slots]; changed in place.
        diagonal: (float): [states, offsets]; changed in place. An observation at an offset
            outside 0..offsets-1 has no place there and reaches V only.
        state_rows: (int64): [rows]; distinct, since rows are updated at once.
        query_positions: (int64): [rows], in slots.
        num_slots: (int64): [rows]; slots visible to each row.
        scores: (float32): [rows, width * block_size]; compact: column c of a row is the slot
            blocks[row, c // block_size] * block_size + c % block_size.
        blocks: (int32): [rows, width]; the scored blocks, padded with -1.
        decay: (float32): [rows]; the share of history kept.
        gain: (float32): [rows]; 1 - decay, rounded once from the exact value.
        block_size: slots per block.

    Returns:
        (bool): [rows, width]; whether any slot of the block was observed.

    Raises:
        IndexError: more visible slots than V holds.

    Source: SPIN, history update (arXiv 2610.09025).
    """
    rows, width = blocks.shape
    by_block = scores.view(rows, width, block_size)
    inner = torch.arange(block_size, device=scores.device)
    slots = blocks.long()[:, :, None] * block_size + inner
    visible = (blocks >= 0)[:, :, None] & (slots < num_slots[:, None, None])
    observed = visible & by_block.isfinite()

    # Whole blocks are copied to their places, so that both histories are updated in long runs.
    longest = int(num_slots.max()) if rows else 0
    if longest > vertical.shape[1]:
        raise IndexError(f"num_slots: at most V's {vertical.shape[1]} slots, got {longest}")
    dense = scores.new_full((rows, -(-longest // block_size), block_size), torch.nan)
    row, column = (visible.any(-1)).nonzero(as_tuple=True)
    masked = by_block.masked_fill(~observed, torch.nan)
    dense[row, blocks[row, column].long()] = masked[row, column]

    for index, (state, q, n) in enumerate(
        zip(state_rows.tolist(), query_positions.tolist(), num_slots.tolist(), strict=True)
    ):
        z = dense[index].flatten()[:n]
        _fold(vertical[state, :n], z, decay[index], gain[index])
        # Slot i lies at offset q - i: the offsets run backwards, from q - n + 1 up to q.
        first, last = max(q - n + 1, 0), min(q, diagonal.shape[1] - 1)
        if first <= last:
            backwards = z[q - last : q - first + 1].flip(0)
            _fold(diagonal[state, first : last + 1], backwards, decay[index], gain[index])
    return observed.any(-1)


def _fold(history: Tensor, z: Tensor, decay: Tensor, gain: Tensor) -> None:
    """Update a run of history in place where there is an observation."""
    before = history.float()
    history.copy_(torch.where(z.isnan(), before, decay * before + gain * z))
