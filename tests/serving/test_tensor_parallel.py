"""Every rank of a tensor-parallel engine chooses and remembers the same, step by step."""

from pathlib import Path

import offline_engine

from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config


def test_two_ranks_hold_the_same_histories_after_every_step(tmp_path: Path) -> None:
    model = tmp_path / "model"
    overrides = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "o_groups": 2}
    write_checkpoint(model, tiny_config(overrides), seed=0)
    settings = SpinSettings(default=PolicySettings(sparsity=0.65, exploration=0.3))
    found = offline_engine.run_apart(
        model, settings.model_dump(mode="json"), tmp_path / "run", threads=1, ranks=2
    )
    digests = found["digests"]
    assert len(digests) > 60
    assert all(len(ranks) == 2 and len(set(ranks)) == 1 for ranks in digests)
    # The digests can differ: histories change with most steps.
    assert len({ranks[0] for ranks in digests}) > 60
    outcomes = found["snapshot"]["layers"]["1"]
    assert outcomes["skipped"] > 0
    assert outcomes["explore"] > 0
