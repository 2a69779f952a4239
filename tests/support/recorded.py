"""Check a trace that the engine recorded against replay, which knows no engine."""

from pathlib import Path

import numpy as np

from spin_server.algorithm.options import SpinOptions
from spin_server.policy.policy import Policy
from spin_server.replay.runner import StepRecord, replay
from spin_server.replay.trace import load_trace


def replayed(path: Path, options: SpinOptions, policies: list[Policy]) -> list[list[StepRecord]]:
    """Replay a recorded request; its scored blocks must be the engine's, step for step.

    Returns:
        For each layer, one record per step.
    """
    with np.load(path) as recorded:
        policy, engine_blocks = int(recorded["policy"]), recorded["scored_blocks"]
    records = replay(load_trace(path), options, policies[policy])
    for layer, steps in enumerate(records):
        for index, step in enumerate(steps):
            blocks = engine_blocks[layer, index]
            assert blocks[blocks >= 0].tolist() == step.blocks, (path.name, policy, layer, index)
    return records
