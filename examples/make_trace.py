"""Write a synthetic trace for `spin-server replay`: scores that drift from step to step.

Run: .venv/bin/python examples/make_trace.py trace.npz
"""

import argparse
from pathlib import Path

import numpy as np


def main() -> None:
    """Make 32 decode steps over 8,192 slots (32K tokens of DeepSeek-V4)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    # Some passages stay important, and every step adds noise of its own.
    lasting = np.repeat(rng.gumbel(size=-(-args.slots // 32)), 32)[: args.slots]
    noise = rng.normal(scale=0.5, size=(args.steps, 1, args.slots))
    tokens = 4 * args.slots - 1 + np.arange(args.steps)[:, None]
    np.savez_compressed(
        args.out,
        scores=(lasting + noise).astype(np.float32),
        query_positions=tokens // 4,
        context_slots=np.full((args.steps, 1), args.slots),
        accepted=np.zeros(args.steps, np.int64),
        turn_starts=np.zeros(args.steps, np.bool_),
    )


if __name__ == "__main__":
    main()
