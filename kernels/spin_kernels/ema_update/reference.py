"""The update of both moving averages, in plain torch."""

from torch import Tensor

from spin_kernels.block_list import block_slots


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

    V[i] becomes decay * V[i] + gain * z[i], each operation rounded to float32, and D likewise.
    A score that is NaN or infinite is not an observation. Skipped blocks keep their history.

    Args:
        vertical: (float32): [states, slots]; changed in place.
        diagonal: (float32): [states, offsets]; changed in place. An observation at an offset
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
        IndexError: a scored slot past V's width.

    Source: SPIN, history update (arXiv 2610.09025).
    """
    slots, visible = block_slots(blocks, num_slots, block_size)
    observed = visible & scores.isfinite()
    row, column = observed.nonzero(as_tuple=True)
    state, slot, score = state_rows[row], slots[row, column], scores[row, column]
    vertical[state, slot] = decay[row] * vertical[state, slot] + gain[row] * score

    offset = query_positions[row] - slot
    inside = (offset >= 0) & (offset < diagonal.shape[1])
    row, state, offset, score = row[inside], state[inside], offset[inside], score[inside]
    diagonal[state, offset] = decay[row] * diagonal[state, offset] + gain[row] * score
    return observed.view(*blocks.shape, block_size).any(-1)
