"""Random traces that are valid and unpleasant, for comparing an implementation with the oracle.

Every slot at or beyond a row's context holds garbage (huge scores, NaN, infinities), so an
implementation that peeks is caught. Finite scores of one trace lie on one binary grid, so that
float64 sums of a few dozen of them are exact in practice whatever the order of summation.
"""

import numpy as np

FAR_POSITIONS = (-1, -7, -1_000, 1_000_000, 2**31, 2**32 - 1, 2**32 + 5, 2**40 + 3, -(2**33) - 2)
HOLES = np.array([np.nan, -np.inf, np.inf], dtype=np.float32)
GARBAGE = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0], dtype=np.float32)


def random_scores(
    rng: np.random.Generator, shape: tuple[int, int, int], *, ties: bool
) -> np.ndarray:
    """Finite float32 scores [steps, rows, slots]: a few persistent peaks above random noise."""
    steps, rows, slots = shape
    if ties:
        scores = rng.integers(-2, 3, size=shape).astype(np.float32)
        scores[(scores == 0) & (rng.random(shape) < 0.5)] = np.float32(-0.0)
    else:
        noise = rng.integers(-4096, 4097, size=shape).astype(np.float32)
        peaks = rng.integers(0, 8192, size=slots) * (rng.random(slots) < 0.25)
        scale = np.float32(2.0 ** int(rng.integers(-40, 21)))
        scores = (noise + peaks.astype(np.float32)) * scale
    negative = rng.random((steps, rows)) < 0.15  # whole rows: unobserved slots outrank them
    scores[negative] = -np.abs(scores[negative])
    if rng.random() < 0.1:  # now and then the whole trace
        scores = -np.abs(scores)
    return scores.astype(np.float32)


def random_trace(
    rng: np.random.Generator,
    *,
    steps: int,
    rows: int,
    slots: int,
    ties: bool,
    holes: bool,
    rewinds: bool,
    turns: bool,
) -> dict[str, np.ndarray]:
    """Make one valid single-layer trace.

    Args:
        steps, rows, slots: the shape of `scores`; rows = 1 + draft length.
        ties: small integer scores, -0.0 among them, instead of scores on a fine grid.
        holes: NaN and infinite scores, single ones and whole rows.
        rewinds: jumps of the position without a turn start, far or negative query positions,
            and rows whose contexts are unrelated to each other.
        turns: steps that start a turn, most of them with a jump ahead, as after a prefill.

    Returns:
        The trace's arrays by name, with the scalars `request_key` (uint64) and `layer` (int64).
    """
    scores = random_scores(rng, (steps, rows, slots), ties=ties)
    query_positions = np.zeros((steps, rows), dtype=np.int64)
    context_slots = np.zeros((steps, rows), dtype=np.int64)
    accepted = rng.integers(0, rows, size=steps).astype(np.int64)
    turn_starts = np.zeros(steps, dtype=np.bool_)

    # Positions are in tokens, four to a slot: several steps share a slot, and a rejection
    # makes the next step's context shorter than the last row's was.
    position = int(rng.integers(0, 4 * slots + 1))
    if rng.random() < 0.6:
        position //= 3  # room to grow; the others soon run with every slot visible
    shift = 0  # added to q: as if the request had begun elsewhere
    if rewinds and rng.random() < 0.3:
        shift = int(rng.choice(FAR_POSITIONS))
    for t in range(steps):
        if turns and rng.random() < 0.25:
            turn_starts[t] = True
            if rng.random() < 0.7:
                position += int(rng.integers(0, slots + 1))
        if rewinds and rng.random() < 0.3:
            position = int(rng.integers(0, 4 * slots + 1))
        for r in range(rows):
            query_positions[t, r] = (position + r) // 4 + shift
            context_slots[t, r] = min((position + r + 1) // 4, slots)
            if rewinds and rng.random() < 0.1:
                context_slots[t, r] = rng.integers(0, slots + 1)
            if rewinds and rng.random() < 0.15:
                near = int(rng.integers(-2 * slots, 4 * slots + 1))
                query_positions[t, r] = near if rng.random() < 0.5 else rng.choice(FAR_POSITIONS)
        position += 1 + int(accepted[t])

    if holes:
        pierced = rng.random(scores.shape) < 0.15
        pierced |= (rng.random((steps, rows)) < 0.05)[:, :, None]
        scores[pierced] = rng.choice(HOLES, size=int(pierced.sum()))
    hidden = np.arange(slots)[None, None, :] >= context_slots[:, :, None]
    scores[hidden] = rng.choice(GARBAGE, size=int(hidden.sum()))

    request_key = int(rng.integers(0, 2**64, dtype=np.uint64))
    if rng.random() < 0.2:
        request_key = 2**64 - 1
    return {
        "scores": scores,
        "query_positions": query_positions,
        "context_slots": context_slots,
        "accepted": accepted,
        "turn_starts": turn_starts,
        "request_key": np.array(request_key, dtype=np.uint64),
        "layer": np.array(int(rng.integers(0, 64)), dtype=np.int64),
    }
