"""The result file of a replay."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from spin_server.policy.policy import Policy
from spin_server.replay.runner import StepRecord


def _describe(step: StepRecord) -> dict[str, Any]:
    described: dict[str, Any] = {
        "blocks": step.blocks,
        "scored_blocks": len(step.blocks),
        "budget": step.budgets,
        "miss": step.misses,
        "dense": step.dense,
    }
    if step.miss_curve is not None:
        described["miss_curve"] = step.miss_curve
    return described


def _totals(steps: Iterable[StepRecord], policy: Policy) -> dict[str, float | None]:
    """Sum up steps; a mean over nothing is null, not zero."""
    steps = list(steps)
    sparse = [step for step in steps if not step.dense]
    misses = [m for step in sparse for m in step.misses[: step.accepted + 1]]
    skipped = [step.num_blocks - len(step.blocks) for step in sparse]
    realized = [s / max(step.num_blocks, 1) for s, step in zip(skipped, sparse, strict=True)]
    return {
        "mean_miss": float(np.mean(misses)) if misses else None,
        "p99_miss": float(np.percentile(misses, 99)) if misses else None,
        "realized_sparsity": float(np.mean(realized)) if realized else None,
        "effective_sparsity": sum(skipped) / max(sum(step.num_blocks for step in steps), 1),
        "target_sparsity": float(policy.sparsity),
    }


def build_report(
    records: list[list[StepRecord]],
    policy: Policy,
    options: dict[str, Any],
    layers: list[int] | None,
) -> dict[str, Any]:
    """Build the result of a replay, ready for JSON.

    Args:
        records: per layer, one record per step.
        policy: whose sparsity was the target.
        options: echoed as they were given.
        layers: the layers' numbers, or None for a trace without a layer axis.

    Returns:
        `steps` and the totals; for several layers, `layers` with both for each, and totals over
        all of them.
    """
    per_layer = [
        {"steps": [_describe(step) for step in steps], **_totals(steps, policy)}
        for steps in records
    ]
    if layers is None:
        return {**per_layer[0], "options": options}
    everything = [step for steps in records for step in steps]
    return {
        "layers": [
            {"layer": layer, **result} for layer, result in zip(layers, per_layer, strict=True)
        ],
        **_totals(everything, policy),
        "options": options,
    }
