"""What the trace factory promises, and what holds for every trace."""

import numpy as np
import pytest
from brute_force import replay
from trace_factory import random_trace


@pytest.mark.parametrize("variant", ["A0", "A1", "A2"])
@pytest.mark.parametrize("policy", ["random", "block_age", "staleness", "none"])
@pytest.mark.parametrize("mask", ["union", "row0"])
def test_random_traces_keep_the_invariants(variant, policy, mask):
    rng = np.random.default_rng(7)
    for index in range(6):
        trace = random_trace(
            rng, steps=8, rows=1 + index % 3, slots=23, ties=index % 2 == 0,
            holes=index % 3 == 0, rewinds=index > 2, turns=index > 3,
        )  # fmt: skip
        result = replay(
            trace, sparsity="0.6", exploration="0" if variant == "A0" else "0.3", policy=policy,
            pooling=("max", "top4", "mean")[index % 3], variant=variant, block_size=3, top_k=4,
            mask=mask, probe_period=4,
        )  # fmt: skip
        for t, step in enumerate(result["steps"]):
            contexts = trace["context_slots"][t].tolist()
            totals = [-(-n // 3) for n in contexts]
            assert step["blocks"] == sorted(set(step["blocks"]))
            assert step["scored_blocks"] == len(step["blocks"])
            assert all(0 <= block < max(totals) for block in step["blocks"])
            assert all((n - 1) // 3 in step["blocks"] for n in contexts if n > 0)
            assert all(0.0 <= miss <= 1.0 for miss in step["miss"])
            if step["dense"]:
                assert step["blocks"] == list(range(max(totals)))
            elif variant != "A0" and (mask == "row0" or len(totals) == 1):
                assert step["budget"][0] <= len(step["blocks"])  # the total stays m
                assert len(step["blocks"]) <= step["budget"][0] + len(totals) - 1


@pytest.mark.parametrize("sparsity", ["0", "0.5"])
def test_nothing_is_missed_when_nothing_is_skipped(sparsity):
    trace = random_trace(
        np.random.default_rng(3), steps=12, rows=2, slots=20, ties=False, holes=True,
        rewinds=True, turns=True,
    )  # fmt: skip
    result = replay(
        trace, sparsity=sparsity, exploration="0.2", block_size=4, top_k=4,
        probe_period=None if sparsity == "0" else 1,
    )  # fmt: skip
    assert all(miss == 0.0 for step in result["steps"] for miss in step["miss"])
    assert result["effective_sparsity"] == 0.0


def test_random_traces_are_valid_seeded_and_show_each_feature():
    seen: set[str] = set()
    for seed in range(40):
        flags = {
            "ties": seed % 2 == 0, "holes": seed % 3 == 0, "rewinds": seed % 5 == 0,
            "turns": seed % 7 == 0,
        }  # fmt: skip
        shape = {"steps": 20, "rows": 1 + seed % 4, "slots": 40}
        trace = random_trace(np.random.default_rng(seed), **shape, **flags)
        again = random_trace(np.random.default_rng(seed), **shape, **flags)
        for name, array in trace.items():
            np.testing.assert_array_equal(array, again[name])
        assert trace["scores"].dtype == np.float32
        assert trace["query_positions"].dtype == trace["context_slots"].dtype == np.int64
        contexts, q = trace["context_slots"], trace["query_positions"]
        assert contexts.min() >= 0
        assert contexts.max() <= 40
        assert trace["accepted"].min() >= 0
        assert trace["accepted"].max() < shape["rows"]
        visible = trace["scores"][np.arange(40) < contexts[:, :, None]]
        finite = visible[np.isfinite(visible)]
        zero = finite == 0
        features = {
            "holes": finite.size < visible.size,
            "minus zero": bool(np.signbit(finite[zero]).any()),
            "negative q": bool((q < 0).any()),
            "far q": bool((q >= 1_000_000).any()),
            "beyond 32 bits": bool((q >= 2**32).any()),
            "empty": bool((contexts == 0).any()),
            "turn": bool(trace["turn_starts"].any()),
            "shrinks": bool((contexts[1:, 0] < contexts[:-1, -1]).any()),
            "key beyond int64": int(trace["request_key"]) >= 2**63,
        }
        if not flags["holes"]:
            assert not features["holes"]
        if not flags["rewinds"]:
            assert not features["negative q"]
            assert not features["far q"]
        if not flags["turns"]:
            assert not features["turn"]
        seen |= {name for name, shown in features.items() if shown}
    assert seen == {
        "holes", "minus zero", "negative q", "far q", "beyond 32 bits", "empty", "turn",
        "shrinks", "key beyond int64",
    }  # fmt: skip
