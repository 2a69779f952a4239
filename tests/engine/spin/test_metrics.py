"""What a snapshot becomes on /metrics."""

import logging
from typing import Any

import pytest

from spin_server.engine.spin.metrics import SpinCollector
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

SNAPSHOT: dict[str, Any] = {
    "layers": {
        2: {"exploit": 10, "explore": 2, "forced": 8, "skipped": 20, "dense": 40},
        5: {"exploit": 11, "explore": 1, "forced": 8, "skipped": 20, "dense": 80},
    },
    "policies": {
        0: {"exploit": 21, "explore": 3, "forced": 16, "skipped": 40, "dense": 120},
    },
    "fallbacks": {"prompt": 3, "short_context": 4},
    "overhead": {"seconds": 0.5, "calls": 7},
    "resets": {"prefill": 5, "preemption": 1, "discontinuity": 0},
    "slots_in_use": 2,
    "slots": 8,
    "min_context": 2048,
    "traces": {"written": 6, "failed": 1},
    "revision": 9,
    "choices": [123, 456],
}


def samples(collector: SpinCollector) -> dict[str, float]:
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            assert sample.labels.pop("engine") == "0"
            found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def collector(*, enabled: bool = True) -> SpinCollector:
    settings = SpinSettings(enabled=enabled, default=PolicySettings(sparsity="0.4"))
    return SpinCollector("m", settings, {"worker 0": ["spin"]})


def test_every_figure_of_a_snapshot_is_exported() -> None:
    spin = collector()
    spin.take(SNAPSHOT)
    assert samples(spin) == {
        "spin_plugin_active worker 0 spin": 1,
        **{f"spin_layer_kv_blocks_total 2 {k}": v for k, v in SNAPSHOT["layers"][2].items()},
        **{f"spin_layer_kv_blocks_total 5 {k}": v for k, v in SNAPSHOT["layers"][5].items()},
        "spin_kv_blocks_total default exploit": 21,
        "spin_kv_blocks_total default explore": 3,
        "spin_kv_blocks_total default forced": 16,
        "spin_kv_blocks_total default skipped": 40,
        "spin_kv_blocks_total default dense": 120,
        "spin_block_sparsity_ratio default target": pytest.approx(0.4),
        "spin_block_sparsity_ratio default effective": 40 / 200,
        "spin_exploration_ratio default target": pytest.approx(0.05),
        "spin_exploration_ratio default effective": 3 / 40,
        "spin_ema_resets_total prefill": 5,
        "spin_ema_resets_total preemption": 1,
        "spin_ema_resets_total discontinuity": 0,
        "spin_fallback_steps_total prompt": 3,
        "spin_fallback_steps_total short_context": 4,
        "spin_state_slots_in_use": 2,
        "spin_min_context_tokens": 2048,
        "spin_state_slots": 8,
        "spin_recorded_traces_total written": 6,
        "spin_recorded_traces_total failed": 1,
        "spin_overhead_seconds_total": 0.5,
        "spin_overhead_calls_total": 7,
        "spin_config_revision applied": 9,
        "spin_ranks_agree": 1,
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_claimed_before_a_snapshot_or_without_spin(enabled: bool) -> None:
    spin = collector(enabled=enabled)
    spin.snapshot = None if enabled else SNAPSHOT
    assert samples(spin) == {"spin_plugin_active worker 0 spin": 1}


def counts(**given: int) -> dict[str, int]:
    return dict.fromkeys(("exploit", "explore", "forced", "skipped", "dense"), 0) | given


def test_blocks_are_the_tenants_that_had_the_row_when_they_were_counted() -> None:
    spin = collector()
    spin.name_rows({"acme": 1}, 1)
    spin.policies[1] = Policy(sparsity=Ratio.parse("s", "0.65"))
    spin.take({**SNAPSHOT, "policies": {0: counts(exploit=5), 1: counts(forced=4, skipped=6)}})
    found = samples(spin)
    assert found["spin_kv_blocks_total acme skipped"] == 6
    assert found["spin_block_sparsity_ratio acme target"] == pytest.approx(0.65)
    assert found["spin_block_sparsity_ratio acme effective"] == 0.6
    # Another tenant gets the row; what acme's requests did is not his.
    spin.name_rows({"other": 1}, 1)
    spin.take({**SNAPSHOT, "policies": {0: counts(exploit=5), 1: counts(forced=5, skipped=9)}})
    found = samples(spin)
    assert found["spin_kv_blocks_total other skipped"] == 3
    assert found["spin_kv_blocks_total _other skipped"] == 6
    assert found["spin_kv_blocks_total default exploit"] == 5
    assert not any(" acme " in name for name in found)


def test_canary_that_is_over_keeps_its_figures_until_its_row_is_somebody_elses() -> None:
    spin = collector()
    spin.name_rows({"acme": 1, "acme/canary": 2, "default/canary": 3}, 1)
    spin.take({**SNAPSHOT, "policies": {2: counts(skipped=5), 3: counts(skipped=6)}})
    spin.name_rows({"acme": 1}, 1)
    # What its running requests still do is its own.
    spin.take({**SNAPSHOT, "policies": {2: counts(skipped=7), 3: counts(skipped=6)}})
    found = samples(spin)
    assert found["spin_kv_blocks_total acme/canary skipped"] == 7
    assert found["spin_kv_blocks_total default/canary skipped"] == 6
    spin.name_rows({"acme": 1, "other": 2}, 1)
    found = samples(spin)
    assert found["spin_kv_blocks_total _other skipped"] == 7
    assert not any("acme/canary" in name for name in found)
    spin.name_rows({"other": 2}, 1)
    assert samples(spin)["spin_kv_blocks_total default/canary skipped"] == 6


def test_canaries_have_series_of_their_own_before_anybody_else() -> None:
    spin = collector()
    rows = {f"t{row:03}": row for row in range(1, 100)} | {"t007/canary": 100}
    spin.name_rows(rows, 1)
    spin.take({**SNAPSHOT, "policies": {row: counts(skipped=row) for row in range(1, 101)}})
    found = samples(spin)
    assert found["spin_kv_blocks_total t007/canary skipped"] == 100
    assert found["spin_kv_blocks_total t007 skipped"] == 7


def test_only_some_tenants_have_series_of_their_own() -> None:
    spin = collector()
    spin.name_rows({f"t{row:03}": row for row in range(1, 201)}, 1)
    spin.take({**SNAPSHOT, "policies": {row: counts(skipped=row) for row in range(1, 201)}})
    found = samples(spin)
    shown = {n: v for n, v in found.items() if n.startswith("spin_kv_blocks_total")}
    assert len(shown) == 5 * 63 + 5  # 63 tenants (`default` counted nothing), and the rest
    assert sum(shown.values()) == sum(range(1, 201))
    assert found["spin_kv_blocks_total _other skipped"] == sum(range(64, 201))


def test_rank_that_chooses_otherwise_is_told_once_and_exported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spin = collector()
    same = {"rank": 0, **SNAPSHOT}
    other_times = {"overhead": {"seconds": 0.7, "calls": 7}, "traces": {"written": 0, "failed": 0}}
    spin.take_ranks([{**same, "rank": 1, **other_times}, same])
    assert samples(spin)["spin_ranks_agree"] == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            spin.take_ranks([same, {**same, "rank": 1, "choices": [123, 457]}])
    assert samples(spin)["spin_ranks_agree"] == 0
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "rank 1 and rank 0 no longer choose alike (choices)"
    ]
    spin.take_ranks([same, {**same, "rank": 1}])
    assert samples(spin)["spin_ranks_agree"] == 1
