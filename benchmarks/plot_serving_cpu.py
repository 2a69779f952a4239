"""Draw what SPIN gains on a CPU from the newest rows of benchmarks/results/serving_cpu.jsonl.

Run: .venv/bin/python -m pip install matplotlib && .venv/bin/python benchmarks/plot_serving_cpu.py
Writes docs/images/serving_cpu.svg.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
OUT = HERE.parent / "docs" / "images" / "serving_cpu.svg"


def newest_rows() -> dict[tuple[int, int], dict]:
    """The last row of each (threads, tokens)."""
    lines = (HERE / "results" / "serving_cpu.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["index_heads"] == 64]
    return {(row["threads"], row["tokens"]): row for row in rows}


def main() -> None:
    rows = {key: row for key, row in sorted(newest_rows().items()) if key[0] == 1}
    figure, axes = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 3.4), sharey=True)
    for axis, ((_, tokens), row) in zip(axes, rows.items(), strict=True):
        keep = row["all_keep_ms"]
        points = [(0.0, 0.0, 0.0)]
        for result in row["results"]:
            saved = (100 - result[name] / keep * 100 for name in ("bound_ms", "step_ms"))
            points.append((float(result["sparsity"]) * 100, *saved))
        sparsity, bound, spin = zip(*points, strict=True)
        axis.plot(sparsity, bound, "--", color="0.5", marker="o", label="bound: no SPIN work")
        axis.plot(sparsity, spin, color="tab:blue", marker="o", label="SPIN")
        axis.set_title(f"{tokens:,} tokens (all-keep {keep:.0f} ms)", fontsize=10)
        axis.set_xlabel("target block sparsity, %")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("decode step saved, %")
    axes[0].legend(loc="upper left", fontsize=9)
    heads, layers = row["index_heads"], row["csa_layers"]
    title = f"vLLM's CPU engine, {heads} index heads, {layers} CSA layers, 1 thread"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
