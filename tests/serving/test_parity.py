"""With every block kept, SPIN changes no token."""

from pathlib import Path

import offline_engine
import pytest

from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config


@pytest.mark.parametrize("threads", [1, 2])
def test_all_blocks_kept_gives_the_tokens_of_the_unmodified_indexer(
    tmp_path: Path, threads: int
) -> None:
    model = tmp_path / "model"
    overrides = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "index_n_heads": 8}
    write_checkpoint(model, tiny_config(overrides), seed=0)
    keep_all = PolicySettings(sparsity=0, exploration=0.2, probe_period=7)
    skip_most = PolicySettings(sparsity=0.65)
    found = {
        name: offline_engine.run_apart(
            model, settings.model_dump(mode="json"), tmp_path / name, threads
        )
        for name, settings in (
            ("off", SpinSettings(enabled=False)),
            ("all kept", SpinSettings(default=keep_all)),
            ("few kept", SpinSettings(default=skip_most)),
        )
    }
    tokens = {name: run["tokens"] for name, run in found.items()}
    expected = [name for name, *_ in offline_engine.SCHEDULE]
    expected += [f"turn {turn}" for turn in range(offline_engine.TURNS)]
    assert sorted(tokens["off"]) == sorted(expected)
    assert tokens["all kept"] == tokens["off"]
    # The comparison can fail: skipping blocks does change tokens, and only of long contexts.
    assert tokens["few kept"] != tokens["off"]
    assert tokens["few kept"]["short"] == tokens["off"]["short"]
    # The schedule holds what it promises: rows of prompts that run as decodes, and short contexts.
    fallbacks = found["all kept"]["snapshot"]["fallbacks"]
    assert fallbacks["prompt"] > 0
    assert fallbacks["short_context"] > 0
    assert not found["off"]["snapshot"]["layers"]
