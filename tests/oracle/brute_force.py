"""SPIN by brute force: a literal, slow transcription of the definition, used as a test oracle.

It shares no code with the product (nor with torch): plain loops over slots, blocks and rows,
dicts for the moving averages, Fractions for the budgets, numpy scalars for float32 rounding.
Nothing here is batched, cached or clever; when it and the product disagree, read this one
beside the definition. It knows one request and one layer at a time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from random_draws import exploration_draw

ZERO = np.float32(0.0)

CHOICES: dict[str, tuple[str, ...]] = {
    "policy": ("random", "block_age", "staleness", "none"),
    "pooling": ("max", "top4", "mean"),
    "variant": ("A0", "A1", "A2"),
    "mask": ("union", "row0"),
    "update": ("prefix", "row0"),
    "history": ("float32", "bfloat16"),
}


# --- Options and state ----------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What one replay runs with; `request_key` and `layer` come from the trace."""

    sparsity: Fraction
    exploration: Fraction
    policy: str
    pooling: str
    variant: str
    ema_decay: float
    block_size: int
    top_k: int
    seed: int
    mask: str
    update: str
    request_key: int
    layer: int
    history: str = "float32"


@dataclass
class State:
    """Everything that a reset forgets.

    In A1 and A0 `vertical` is keyed by slot and `diagonal` by q - slot; in A2 by block and by
    floor(q / b) - block. A missing key is 0. `last_seen` maps a block to the step since the
    reset that last observed it.
    """

    vertical: dict[int, np.float32] = field(default_factory=dict)
    diagonal: dict[int, np.float32] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0


@dataclass(frozen=True)
class Row:
    """One query of a step: its scores (only slots below `context` count), q and N.

    Its random draw is that of the request's first row of the step.
    """

    scores: Sequence[np.float32]
    query_position: int
    context: int
    draw_position: int


# --- Geometry -------------------------------------------------------------------------------


def num_blocks(context: int, block_size: int) -> int:
    """B = ceil(N / b)."""
    return -(-context // block_size)


def visible_slots(block: int, context: int, block_size: int) -> list[int]:
    """The slots of `block` that a row with `context` visible slots can see."""
    return [slot for slot in range(block * block_size, (block + 1) * block_size) if slot < context]


def forced_blocks(context: int, block_size: int) -> set[int]:
    """The sink block and the block of slot N - 1; none when nothing is visible."""
    if context == 0:
        return set()
    return {0, (context - 1) // block_size}


# --- Moving averages ------------------------------------------------------------------------


def pool(values: Sequence[np.float32], pooling: str) -> np.float32 | float:
    """Pool one or more float32 values: max stays float32, top4 and mean are float64."""
    if pooling == "max":
        best = values[0]
        for value in values:
            if value > best:
                best = value
        return best
    chosen = sorted(values, reverse=True)[:4] if pooling == "top4" else list(values)
    total = 0.0
    for value in chosen:
        total += float(value)
    return total / len(chosen)


def decay_towards(
    old: np.float32, observed: np.float32, decay: float, history: str = "float32"
) -> np.float32:
    """One EMA update; both products and the sum are rounded to float32."""
    kept = np.float32(decay) * old
    added = np.float32(1 - decay) * observed
    new = np.float32(kept + added)
    return new if history == "float32" else to_bfloat16(new)


def to_bfloat16(value: np.float32) -> np.float32:
    """Round to the upper half of float32's bits, to the even one of two that are as near."""
    bits = int(value.view(np.uint32))
    upper, lower = bits >> 16, bits & 0xFFFF
    if lower > 0x8000 or (lower == 0x8000 and upper % 2):
        upper += 1
    return np.uint32(upper << 16).view(np.float32)


def observe(state: State, row: Row, blocks: Sequence[int], options: Options) -> None:
    """Commit one valid row's scores of the scored `blocks` to the state."""
    q, b = row.query_position, options.block_size
    for block in blocks:
        seen: dict[int, np.float32] = {}
        for slot in visible_slots(block, row.context, b):
            if math.isfinite(row.scores[slot]):
                seen[slot] = row.scores[slot]
        if not seen:
            continue
        state.last_seen[block] = state.num_steps
        if options.variant == "A2":
            pooled = np.float32(pool(list(seen.values()), options.pooling))
            observations = [(block, q // b - block, pooled)]
        else:
            observations = [(slot, q - slot, z) for slot, z in seen.items()]
        for position, offset, z in observations:
            for average, index in ((state.vertical, position), (state.diagonal, offset)):
                average[index] = decay_towards(
                    average.get(index, ZERO), z, options.ema_decay, options.history
                )


def predicted_slot_score(state: State, slot: int, query_position: int) -> np.float32:
    """max(V[i], D[q - i])."""
    vertical = state.vertical.get(slot, ZERO)
    diagonal = state.diagonal.get(query_position - slot, ZERO)
    return diagonal if diagonal > vertical else vertical


def predicted_block_scores(state: State, row: Row, options: Options) -> list[np.float32 | float]:
    """S of each of the row's B blocks."""
    b = options.block_size
    predicted: list[np.float32 | float] = []
    for block in range(num_blocks(row.context, b)):
        if options.variant == "A2":
            vertical = state.vertical.get(block, ZERO)
            diagonal = state.diagonal.get(row.query_position // b - block, ZERO)
            predicted.append(diagonal if diagonal > vertical else vertical)
        else:
            slots = visible_slots(block, row.context, b)
            scores = [predicted_slot_score(state, slot, row.query_position) for slot in slots]
            predicted.append(pool(scores, options.pooling))
    return predicted


# --- Selection ------------------------------------------------------------------------------


def block_budget(context: int, options: Options, replacement: int | None = None) -> int:
    """m of one row; `replacement` stands in for ceil((1 - rho) * B) alone."""
    total = num_blocks(context, options.block_size)
    wanted = math.ceil((1 - options.sparsity) * total) if replacement is None else replacement
    floor_of_k = -(-options.top_k // options.block_size)
    budget = min(total, max(floor_of_k, wanted))
    return max(budget, len(forced_blocks(context, options.block_size)))


def exploration_count(budget: int, num_forced: int, options: Options) -> int:
    """e of one row.

    The cap by "blocks not selected yet" needs no line: those are B - (m - e), and m <= B.
    """
    if options.exploration == 0 or options.policy == "none":
        return 0
    wanted = max(1, math.floor(options.exploration * budget))
    return min(wanted, budget - num_forced)


def exploration_order(
    candidates: Sequence[int],
    predicted: Sequence[np.float32 | float],
    state: State,
    row: Row,
    options: Options,
) -> list[int]:
    """The unselected blocks of a row in the order in which the policy would explore them."""
    if options.policy == "random":
        draws = {
            block: exploration_draw(
                block,
                query_position=row.draw_position,
                layer=options.layer,
                seed=options.seed,
                request_key=options.request_key,
            )
            for block in candidates
        }
        return sorted(candidates, key=lambda block: (draws[block], block))
    last = [state.last_seen.get(block, -1) for block in range(len(predicted))]
    if options.policy == "block_age":
        return sorted(candidates, key=lambda block: (last[block], block))
    staleness: dict[int, int] = {}
    for block in candidates:
        age_rank = sum(1 for other in range(len(predicted)) if last[other] > last[block])
        score_rank = sum(1 for other in predicted if other < predicted[block])
        staleness[block] = age_rank + score_rank
    return sorted(candidates, key=lambda block: (-staleness[block], block))


def select_blocks(
    state: State, row: Row, options: Options, replacement: int | None
) -> tuple[set[int], int]:
    """The blocks that one row asks for in A1 and A2, and its budget m."""
    budget = block_budget(row.context, options, replacement)
    forced = forced_blocks(row.context, options.block_size)
    explored = exploration_count(budget, len(forced), options)
    predicted = predicted_block_scores(state, row, options)
    blocks = range(len(predicted))

    selected = set(forced)
    for block in sorted(blocks, key=lambda j: (-predicted[j], j)):
        if len(selected) < budget - explored:
            selected.add(block)

    candidates = [block for block in blocks if block not in selected]
    selected |= set(exploration_order(candidates, predicted, state, row, options)[:explored])
    return selected, budget


def select_slots_then_blocks(state: State, row: Row, options: Options) -> tuple[set[int], int]:
    """The blocks that one row asks for in A0, and its slot budget."""
    budget = math.ceil((1 - options.sparsity) * row.context)
    predicted = [
        predicted_slot_score(state, slot, row.query_position) for slot in range(row.context)
    ]
    best = sorted(range(row.context), key=lambda slot: (-predicted[slot], slot))[:budget]
    expanded = {slot // options.block_size for slot in best}
    return expanded | forced_blocks(row.context, options.block_size), budget


def shared_blocks(
    rows: Sequence[Row], selections: Sequence[set[int]], options: Options
) -> set[int]:
    """The one set that every row of the step scores."""
    if options.mask == "union":
        return set().union(*selections)
    shared = set(selections[0])
    for row in rows:
        if row.context > 0:
            shared.add((row.context - 1) // options.block_size)
    return shared


def miss_rate(row: Row, blocks: set[int], options: Options) -> float:
    """Share of the row's dense top-K slots that lie outside `blocks`; 0 when there is none."""
    finite = [slot for slot in range(row.context) if math.isfinite(row.scores[slot])]
    dense_top = sorted(finite, key=lambda slot: (-row.scores[slot], slot))[: options.top_k]
    if not dense_top:
        return 0.0
    missed = [slot for slot in dense_top if slot // options.block_size not in blocks]
    return len(missed) / len(dense_top)


# --- Replay ---------------------------------------------------------------------------------


def replay(
    trace: Mapping[str, np.ndarray],
    *,
    sparsity: str,
    exploration: str,
    policy: str = "random",
    pooling: str = "max",
    variant: str = "A1",
    ema_decay: float = 0.5,
    block_size: int = 64,
    top_k: int = 512,
    seed: int = 0,
    mask: str = "union",
    update: str = "prefix",
    history: str = "float32",
    budgets: Sequence[int] | None = None,
    probe_period: int | None = None,
) -> dict[str, Any]:
    """Run SPIN over one layer's recorded scores.

    Args:
        trace: `scores` float32 [steps, rows, slots]; `query_positions` and `context_slots`
            int64 [steps, rows]; `accepted` int64 [steps]; `turn_starts` bool [steps];
            optionally the scalars `request_key` (uint64) and `layer` (int), both 0 if absent.
        sparsity, exploration: decimal strings in [0, 1], taken exactly.
        budgets: one block budget per step in place of ceil((1 - rho) * B); not with A0.
        probe_period: steps 0, P, 2P, ... since a reset are dense; None: only step 0 is.

    Returns:
        `steps` (per step `blocks`, `scored_blocks`, `budget`, `miss`, `dense`), `mean_miss`,
        `p99_miss`, `realized_sparsity`, `effective_sparsity` and `target_sparsity`.

    Raises:
        ValueError: an unknown or contradictory option, or a trace that is not valid.
    """
    chosen = {
        "policy": policy,
        "pooling": pooling,
        "variant": variant,
        "mask": mask,
        "update": update,
        "history": history,
    }
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name}: expected one of {CHOICES[name]}, got {value!r}")
    options = Options(
        sparsity=Fraction(sparsity),
        exploration=Fraction(exploration),
        ema_decay=ema_decay,
        block_size=block_size,
        top_k=top_k,
        seed=seed,
        request_key=int(trace.get("request_key", 0)),
        layer=int(trace.get("layer", 0)),
        **chosen,
    )
    check(trace, options, budgets, probe_period)

    state = State()
    steps: list[dict[str, Any]] = []
    counted_misses: list[float] = []
    sparsities: list[float] = []
    num_skipped = 0
    num_all = 0

    for t in range(len(trace["scores"])):
        rows = [
            Row(
                scores=list(trace["scores"][t, r]),
                query_position=int(q),
                context=int(n),
                draw_position=int(trace["query_positions"][t, 0]),
            )
            for r, (q, n) in enumerate(
                zip(trace["query_positions"][t], trace["context_slots"][t], strict=True)
            )
        ]
        accepted = int(trace["accepted"][t])
        if t == 0 or trace["turn_starts"][t]:
            state = State()
        dense = state.num_steps == 0
        if probe_period is not None and state.num_steps % probe_period == 0:
            dense = True
        largest = max(num_blocks(row.context, block_size) for row in rows)

        # Every row predicts from the state before this step.
        if dense:
            shared = set(range(largest))
            if variant == "A0":
                row_budgets = [row.context for row in rows]
            else:
                row_budgets = [num_blocks(row.context, block_size) for row in rows]
            misses = [0.0 for _ in rows]
        else:
            if variant == "A0":
                picked = [select_slots_then_blocks(state, row, options) for row in rows]
            else:
                replacement = None if budgets is None else int(budgets[t])
                picked = [select_blocks(state, row, options, replacement) for row in rows]
            row_budgets = [budget for _, budget in picked]
            shared = shared_blocks(rows, [blocks for blocks, _ in picked], options)
            misses = [miss_rate(row, shared, options) for row in rows]
            counted_misses += misses[: accepted + 1]
            sparsities.append(1 - len(shared) / largest if largest > 0 else 0.0)
            num_skipped += largest - len(shared)
        num_all += largest

        # Only now the verdict is known: the valid rows are committed in order.
        committed = rows[:1] if update == "row0" else rows[: accepted + 1]
        for row in committed:
            observe(state, row, sorted(shared), options)
        state.num_steps += 1

        steps.append(
            {
                "blocks": sorted(shared),
                "scored_blocks": len(shared),
                "budget": row_budgets,
                "miss": misses,
                "dense": dense,
            }
        )

    return {
        "steps": steps,
        "mean_miss": sum(counted_misses) / len(counted_misses) if counted_misses else None,
        "p99_miss": float(np.percentile(counted_misses, 99)) if counted_misses else None,
        "realized_sparsity": sum(sparsities) / len(sparsities) if sparsities else None,
        "effective_sparsity": num_skipped / num_all if num_all > 0 else 0.0,
        "target_sparsity": float(sparsity),
    }


def check(
    trace: Mapping[str, np.ndarray],
    options: Options,
    budgets: Sequence[int] | None,
    probe_period: int | None,
) -> None:
    """Raise ValueError unless the options agree with one another and the trace is valid."""
    for name, share in (("sparsity", options.sparsity), ("exploration", options.exploration)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: expected 0 to 1, got {share}")
    if options.variant == "A0" and options.exploration > 0:
        raise ValueError("exploration: A0 does not explore, expected 0")
    if options.variant == "A0" and budgets is not None:
        raise ValueError("budgets: A0 has a slot budget and takes no block budgets")
    if options.block_size < 1 or options.top_k < 0:
        raise ValueError("block_size and top_k: expected at least 1 and 0")
    if probe_period is not None and probe_period < 1:
        raise ValueError(f"probe_period: expected at least 1, got {probe_period}")

    num_steps, num_rows, num_slots = trace["scores"].shape
    shapes = {
        "query_positions": (num_steps, num_rows),
        "context_slots": (num_steps, num_rows),
        "accepted": (num_steps,),
        "turn_starts": (num_steps,),
    }
    for name, shape in shapes.items():
        if trace[name].shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {trace[name].shape}")
    if budgets is not None and len(budgets) != num_steps:
        raise ValueError(f"budgets: expected {num_steps}, got {len(budgets)}")
    if num_rows < 1 or trace["scores"].dtype != np.float32:
        raise ValueError("scores: expected float32 [steps, rows, slots] with at least one row")
    for t in range(num_steps):
        if not 0 <= trace["accepted"][t] < num_rows:
            raise ValueError(f"accepted: expected 0 to {num_rows - 1} at step {t}")
        for context in trace["context_slots"][t]:
            if not 0 <= context <= num_slots:
                raise ValueError(f"context_slots: expected 0 to {num_slots} at step {t}")
