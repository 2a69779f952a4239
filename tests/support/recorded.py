"""Check a trace that the engine recorded against replay, which knows no engine."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.settings import PolicySettings
from spin_server.replay.runner import StepRecord, replay
from spin_server.replay.trace import load_trace


def write_policies(path: Path, policies: dict[str, dict[str, Any]]) -> None:
    """Write a file for --spin-policies."""
    path.write_text(yaml.safe_dump({"policies": policies}, sort_keys=False))


def replayed(
    path: Path, options: SpinOptions, policies: dict[str, dict[str, Any]]
) -> list[list[StepRecord]]:
    """Replay a recorded request; its scored blocks must be the engine's, step for step.

    Args:
        path: the trace.
        options: of the server.
        policies: as in the server's file; the default policy is the product's.

    Returns:
        For each layer, one record per step.
    """
    with np.load(path) as recorded:
        policy, engine_blocks = int(recorded["policy"]), recorded["scored_blocks"]
    chosen = [{}, *policies.values()][policy]  # id 0 is the default
    records = replay(load_trace(path), options, PolicySettings(**chosen).policy())
    for layer, steps in enumerate(records):
        for index, step in enumerate(steps):
            blocks = engine_blocks[layer, index]
            assert blocks[blocks >= 0].tolist() == step.blocks, (path.name, policy, layer, index)
    return records
