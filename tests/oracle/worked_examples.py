"""Small traces written out by hand, and how the oracle's tests read its answers."""

from fractions import Fraction
from typing import Any

import numpy as np
from brute_force import Options, replay


def make_trace(
    scores: list[list[list[float]]],
    q: list[list[int]],
    n: list[list[int]],
    accepted: list[int] | None = None,
    turns: tuple[int, ...] = (),
) -> dict[str, np.ndarray]:
    """A trace from nested lists [steps][rows][slots]; every row is valid unless told."""
    steps, rows = len(scores), len(scores[0])
    return {
        "scores": np.array(scores, dtype=np.float32),
        "query_positions": np.array(q, dtype=np.int64),
        "context_slots": np.array(n, dtype=np.int64),
        "accepted": np.array([rows - 1] * steps if accepted is None else accepted, np.int64),
        "turn_starts": np.array([t in turns for t in range(steps)]),
    }


def one_row(
    scores: list[list[float]], q: list[int], n: list[int] | None = None, **more: Any
) -> dict[str, np.ndarray]:
    """A trace of one row a step; by default every slot is visible."""
    contexts = [len(scores[0])] * len(scores) if n is None else n
    return make_trace([[s] for s in scores], [[p] for p in q], [[c] for c in contexts], **more)


def options(**changed: Any) -> Options:
    """The default options, with block and top-K sizes of 1."""
    values: dict[str, Any] = {
        "sparsity": Fraction(0), "exploration": Fraction(0), "policy": "random", "pooling": "max",
        "variant": "A1", "ema_decay": 0.5, "block_size": 1, "top_k": 1, "seed": 0,
        "mask": "union", "update": "prefix", "request_key": 0, "layer": 0,
    }  # fmt: skip
    return Options(**{**values, **changed})


def run(trace: dict[str, np.ndarray], sparsity: str, exploration: str = "0", **more: Any) -> dict:
    """Replay with block and top-K sizes of 1 unless told."""
    return replay(
        trace, sparsity=sparsity, exploration=exploration, **{"block_size": 1, "top_k": 1, **more}
    )


def blocks_of(result: dict[str, Any]) -> list[list[int]]:
    return [step["blocks"] for step in result["steps"]]
