"""What storing histories as bfloat16 changes: the blocks chosen, and the slots missed.

  .venv/bin/python benchmarks/history_types.py TRACE.npz...
Traces of every score: `spin-server serve MODEL --spin-sparsity 0 --spin-record FOLDER`.
Every trace is replayed with both types, the same exploration draws included. Of every step that is
not dense: how many of the chosen blocks float32 would not have chosen, and the miss rate of both.
"""

import argparse
import datetime
import json
from pathlib import Path

import numpy as np
from machine import commit

from spin_server.algorithm.options import HistoryType, SpinOptions
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio
from spin_server.replay.runner import StepRecord, replay
from spin_server.replay.trace import load_trace

SPARSITIES = {"0.3": "0.05", "0.4": "0.2", "0.5": "0.2", "0.65": "0.05"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--commit", default=commit(), help="what is measured")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "history_types.jsonl"
    )
    args = parser.parse_args()
    traces = [load_trace(path) for path in args.traces]
    print("| sparsity | steps | blocks that differ | miss rate, float32 | bfloat16 |")
    for sparsity, exploration in SPARSITIES.items():
        policy = Policy(
            sparsity=Ratio.parse("sparsity", sparsity),
            exploration=Ratio.parse("exploration", exploration),
        )
        differing, chosen = 0, 0
        misses: dict[HistoryType, list[float]] = {"float32": [], "bfloat16": []}
        for trace in traces:
            found: dict[HistoryType, list[StepRecord]] = {
                history: [r for layer in replay(trace, options, policy) for r in layer]
                for history in misses
                for options in [SpinOptions(history=history)]
            }
            for exact, rounded in zip(found["float32"], found["bfloat16"], strict=True):
                if exact.dense:
                    continue
                differing += len(set(rounded.blocks) - set(exact.blocks))
                chosen += len(exact.blocks)
                misses["float32"] += exact.misses
                misses["bfloat16"] += rounded.misses
        row = {
            "date": datetime.date.today().isoformat(),
            "commit": args.commit,
            "traces": len(traces),
            "target_sparsity": float(sparsity),
            "exploration": float(exploration),
            "steps": len(misses["float32"]),
            "differing_blocks": differing / chosen,
            "mean_miss": {history: float(np.mean(found)) for history, found in misses.items()},
        }
        print(
            f"| {sparsity} | {row['steps']} | {differing / chosen:.2%} "
            f"| {np.mean(misses['float32']):.4%} | {np.mean(misses['bfloat16']):.4%} |"
        )
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
