"""Replay equals the literal transcription in tests/oracle on adversarial traces, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import brute_force
import numpy as np
import pytest
import trace_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spin_server.algorithm.options import SpinOptions
from spin_server.policy.policy import EXPLORATION_POLICIES, Policy
from spin_server.policy.ratio import Ratio
from spin_server.replay.report import build_report
from spin_server.replay.runner import replay
from spin_server.replay.trace import load_trace

TRACES = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 12),
        "rows": st.sampled_from([1, 2, 3, 6]),
        "slots": st.sampled_from([1, 7, 40, 130]),
        "ties": st.booleans(),
        "holes": st.booleans(),
        "rewinds": st.booleans(),
        "turns": st.booleans(),
    }
)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "sparsity": st.sampled_from(["0", "0.3", "0.4", "0.5", "0.65", "0.7", "0.123456789", "1"]),
    "exploration": st.sampled_from(["0", "0.05", "0.2", "0.5", "1"]),
    "policy": st.sampled_from(EXPLORATION_POLICIES),
    "pooling": st.sampled_from(["max", "top4", "mean"]),
    "ema_decay": st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    "block_size": st.sampled_from([1, 2, 4, 8]),
    "top_k": st.sampled_from([1, 8, 20]),
    "seed": st.sampled_from([0, 1, 2**63]),
    "history": st.sampled_from(["float32", "bfloat16"]),
    "mask": st.sampled_from(["union", "row0"]),
    "update": st.sampled_from(["prefix", "row0"]),
    "probe_period": st.sampled_from([None, 1, 3]),
}


def product(path: Path, **o: Any) -> dict[str, Any]:
    policy = Policy(
        sparsity=Ratio.parse("sparsity", o["sparsity"]),
        exploration=Ratio.parse("exploration", o["exploration"]),
        exploration_policy=o["policy"],
        ema_decay=Ratio.parse("ema_decay", o["ema_decay"]),
        probe_period=o["probe_period"] or 0,
    )
    options = SpinOptions(
        block_size=o["block_size"],
        top_k=o["top_k"],
        variant=o["variant"],
        pooling=o["pooling"],
        mask_sharing=o["mask"],
        update_rule=o["update"],
        seed=o["seed"],
        history=o["history"],
    )
    records = replay(load_trace(path), options, policy, o.get("budgets"))
    return build_report(records, policy, {}, None)


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    for step, (g, w) in enumerate(zip(got["steps"], want["steps"], strict=True)):
        assert {k: g[k] for k in w} == w, f"step {step}"
    for key in ("mean_miss", "p99_miss", "realized_sparsity", "effective_sparsity"):
        assert got[key] == pytest.approx(want[key], abs=1e-12), key
    assert got["target_sparsity"] == want["target_sparsity"]


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., None]:
    def run(trace_seed: int, shape: dict[str, Any], /, **options: Any) -> None:
        trace = trace_factory.random_trace(np.random.default_rng(trace_seed), **shape)
        np.savez(tmp_path / "trace.npz", **trace)
        assert_equal(
            product(tmp_path / "trace.npz", **options), brute_force.replay(trace, **options)
        )

    return run


many = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("variant", ["A1", "A2"])
@many
@given(seed=SEEDS, shape=TRACES, options=st.fixed_dictionaries(OPTIONS))
def test_blocks_and_misses_equal_brute_force(
    compare: Callable[..., None], variant: str, seed: int, shape: Any, options: Any
) -> None:
    compare(seed, shape, variant=variant, **options)


@many
@given(seed=SEEDS, shape=TRACES, options=st.fixed_dictionaries(OPTIONS))
def test_slot_selection_equals_brute_force(
    compare: Callable[..., None], seed: int, shape: Any, options: Any
) -> None:
    compare(seed, shape, variant="A0", **{**options, "exploration": "0"})


@many
@given(seed=SEEDS, shape=TRACES, options=st.fixed_dictionaries(OPTIONS), data=st.data())
def test_given_budgets_equal_brute_force(
    compare: Callable[..., None], seed: int, shape: Any, options: Any, data: st.DataObject
) -> None:
    budgets = data.draw(
        st.lists(st.integers(0, 40), min_size=shape["steps"], max_size=shape["steps"])
    )
    compare(seed, shape, variant="A1", **options, budgets=budgets)


@pytest.mark.parametrize(("slots", "top_k"), [(3000, 512), (6000, 2048)])
def test_real_sizes_equal_brute_force(compare: Callable[..., None], slots: int, top_k: int) -> None:
    shape = {
        **{"steps": 6, "rows": 2, "slots": slots},
        **{"ties": False, "holes": False, "rewinds": False, "turns": False},
    }
    compare(
        7,
        shape,
        sparsity="0.4",
        exploration="0.2",
        policy="random",
        pooling="max",
        variant="A1",
        ema_decay=0.5,
        block_size=64,
        top_k=top_k,
        seed=0,
        history="float32",
        mask="union",
        update="prefix",
        probe_period=None,
    )
