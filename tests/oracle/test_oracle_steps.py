"""The oracle's steps against examples worked out by hand.

No expected value here was obtained by running the oracle.
"""

import math

import numpy as np
import pytest
from brute_force import replay
from worked_examples import blocks_of, make_trace, one_row, run

INF = math.inf
NAN = math.nan

# --- Resets and probes ----------------------------------------------------------------------


def test_turn_starts_and_probes_are_dense():
    trace = one_row([[0.0] * 4] * 6, q=[3] * 6, turns=(3,))
    result = run(trace, "0.5", probe_period=2)
    assert [s["dense"] for s in result["steps"]] == [True, False, True, True, False, True]
    # Two sparse steps skip 2 of 4 blocks each; six steps have 24.
    assert result["realized_sparsity"] == 0.5
    assert result["effective_sparsity"] == 4 / 24


def test_turn_start_forgets():
    scores = [[0, 64, 0, 0], [0, 64, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    trace = one_row(scores, q=[3] * 4, turns=(2,))
    assert blocks_of(run(trace, "0.25")) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 2, 3]]


def test_probe_updates_but_keeps_history():
    # Block 1: 8 -> 4 (step 0); block 2: 6 -> 3. The probe at step 2 observes 0 and 9.
    # Step 1 scores block 1 again with 8: 0.5 * 4 + 4 = 6; step 2: 3. Block 2: 1.5 + 4.5 = 6.
    scores = [[0, 8, 6, 0], [0, 8, 6, 0], [0, 0, 9, 0], [0, 0, 0, 0]]
    result = run(one_row(scores, q=[3] * 4), "0.25", probe_period=2)
    assert blocks_of(result) == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [0, 2, 3]]


def test_all_dense_run_has_no_miss_and_no_realized_sparsity():
    result = run(one_row([[1.0] * 4] * 2, q=[3, 3]), "0.5", probe_period=1)
    assert result["mean_miss"] is None
    assert result["p99_miss"] is None
    assert result["realized_sparsity"] is None
    assert result["effective_sparsity"] == 0.0


@pytest.mark.parametrize("variant", ["A0", "A1", "A2"])
def test_empty_context(variant):
    result = run(one_row([[1.0] * 4] * 2, q=[0, 0], n=[0, 0]), "0.5", variant=variant)
    assert result["steps"][1] == {
        "blocks": [], "scored_blocks": 0, "budget": [0], "miss": [0.0], "dense": False
    }  # fmt: skip
    assert result["realized_sparsity"] == 0.0
    assert result["effective_sparsity"] == 0.0
    assert result["mean_miss"] == 0.0


# --- Exploration policies -------------------------------------------------------------------


def test_exploration_replaces_exploitation_within_m():
    # m = 4, forced 0 and 5, e = 1: block 1 is exploited, the oldest of 2, 3, 4 explored.
    trace = one_row([[0, 8, 1, 2, 4, 0]] * 2, q=[5, 5])
    explored = run(trace, "0.34", "0.25", policy="block_age")
    assert blocks_of(explored)[1] == [0, 1, 2, 5]
    assert explored["steps"][1]["budget"] == [4]
    assert blocks_of(run(trace, "0.34", "0.25", policy="none"))[1] == [0, 1, 4, 5]


def test_exploration_draws_from_all_that_exploitation_left():
    # m = 5 of 6, e = min(floor(0.5 * 5), 3) = 2: three blocks are left to two explorers.
    trace = one_row([[0, 1, 2, 4, 8, 0]] * 2, q=[5, 5])
    result = run(trace, "0.2", "0.5", policy="block_age")
    assert blocks_of(result)[1] == [0, 1, 2, 4, 5]


def test_block_age_goes_round():
    trace = one_row([[0, 8, 8, 8, 8, 0]] * 6, q=[5] * 6)  # m = 3, e = 1, forced 0 and 5
    result = run(trace, "0.5", "0.5", policy="block_age")
    assert blocks_of(result)[1:] == [[0, 1, 5], [0, 2, 5], [0, 3, 5], [0, 4, 5], [0, 1, 5]]


def test_block_age_of_a_hole_is_not_refreshed_and_never_observed_is_oldest():
    scores = [[0, 8, 8, 8, NAN, 0], [0] * 6, [0, 0, NAN, 0, 0, 0], [0] * 6, [0] * 6]
    trace = one_row(scores, q=[5] * 5)
    result = run(trace, "0.5", "0.5", policy="block_age")
    # Block 4 was never seen, so it goes first; step 2's hole lies in a skipped block.
    assert blocks_of(result)[1:] == [[0, 4, 5], [0, 1, 5], [0, 2, 5], [0, 3, 5]]
    # With the hole at step 3 the block is scored but not observed: step 4 takes it again.
    scores[2], scores[3] = [0] * 6, [0, 0, NAN, 0, 0, 0]
    result = run(one_row(scores, q=[5] * 5), "0.5", "0.5", policy="block_age")
    assert blocks_of(result)[1:] == [[0, 4, 5], [0, 1, 5], [0, 2, 5], [0, 2, 5]]


@pytest.mark.parametrize(
    ("accepted", "update", "expected"),
    [
        ([1, 0, 0], "prefix", [0, 1, 4]),  # row 1 of step 1 is rejected: block 1 stays old
        ([1, 1, 0], "prefix", [0, 2, 4]),  # accepted: block 1 is fresh
        ([1, 1, 0], "row0", [0, 1, 4]),  # only row 0 commits
    ],
)
def test_block_age_counts_valid_rows_only(accepted, update, expected):
    # Row 0 of step 1 sees nothing finite; row 1 does. Same q, N: both explore block 1.
    empty = [NAN] * 5
    scores = [[[0.0] * 5] * 2, [empty, [0.0] * 5], [[0.0] * 5] * 2]
    trace = make_trace(scores, [[4, 4]] * 3, [[5, 5]] * 3, accepted)
    result = run(trace, "0.4", "0.5", policy="block_age", update=update)
    assert blocks_of(result)[1:] == [[0, 1, 4], expected]


def test_staleness_adds_age_rank_and_score_rank():
    # m = 3, e = 1, forced 0 and 5. V after step 0: 0 4 3 2 1 0.
    trace = one_row([[0, 8, 6, 4, 2, 0]] * 4, q=[5] * 4)
    result = run(trace, "0.5", "0.5", policy="staleness")
    # Step 1: all equally old; score ranks of 1-4 are 5 4 3 2             -> 1 (V becomes 6)
    # Step 2: age ranks 0 3 3 3 (0, 1, 5 are younger), sums 5 7 6 5       -> 2 (V becomes 4.5)
    # Step 3: age ranks 3 0 4 4 (0, 2, 5; none; 0, 1, 2, 5), sums 8 4 7 6 -> 1
    assert blocks_of(result)[1:] == [[0, 1, 5], [0, 2, 5], [0, 1, 5]]


def test_staleness_tie_goes_to_the_lower_block():
    trace = one_row([[0, 8, 2, 2, 0, -1, 0]] * 3, q=[6] * 3)
    # m = 3 of 7 by budgets, forced 0 and 6, e = 1. V: 0 4 1 1 0 -0.5 0.
    # Step 1: all equally old; block 1's score rank is 6                    -> 1
    # Step 2: of 1-5, age ranks 0 3 3 3 3 (0, 1, 6 are younger) and score
    #         ranks 6 4 4 1 0 sum to 6 7 7 4 3                              -> 2
    result = run(trace, "0", "0.5", policy="staleness", budgets=[3] * 3)
    assert blocks_of(result)[1:] == [[0, 1, 6], [0, 2, 6]]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        # Block 4 is alone in being oldest: age rank 5, the others 0. Score ranks of 1-4 are
        # 5 4 3 2 (0 and 5 are negative): sums 5 4 3 7. Counting equally old ones: 10 9 8 8.
        ([-1, 8, 6, 4, NAN, -1], [0, 4, 5]),
        # Score ranks of 1-4 are 5 0 0 0: sums 5 0 0 5. Counting equal scores: 6 5 5 10.
        ([0, 8, 0, 0, NAN, 0], [0, 1, 5]),
    ],
    ids=["age", "score"],
)
def test_staleness_ranks_count_strictly(scores, expected):
    result = run(one_row([scores, [0] * 6], q=[5, 5]), "0.5", "0.5", policy="staleness")
    assert blocks_of(result)[1] == expected


# --- Speculation ----------------------------------------------------------------------------


def speculative_trace(
    accepted_last: int, first_row1: list[float], accepted_first: int = 0
) -> dict[str, np.ndarray]:
    """Two rows (q, N) = (5, 6) and (6, 7), two steps."""
    scores = [
        [[0, 0, 3, 2, 1, 0, 9], first_row1],
        [[0, 0, 0, 0, 5, 0, 9], [0, 0, 0, 5, 0, 0, 0]],
    ]
    return make_trace(scores, [[5, 6]] * 2, [[6, 7]] * 2, [accepted_first, accepted_last])


def test_union_of_rows_and_valid_miss():
    rejected = [0.0, 90, 0, 0, 0, 0, 0]
    result = run(speculative_trace(0, rejected), "0.5")
    # Row 0: S = 0 0 1.5 1 .5 0, m = 3: 0 2 5. Row 1: the diagonal lifts slots 3, 4, 5 to
    # 1.5, 1, .5; m = ceil(3.5) = 4: 0 2 3 6.
    assert result["steps"][0]["budget"] == [6, 7]
    assert result["steps"][1]["blocks"] == [0, 2, 3, 5, 6]
    assert result["steps"][1]["budget"] == [3, 4]
    assert result["steps"][1]["miss"] == [1.0, 0.0]  # slot 4 skipped; slot 3 scored
    assert result["mean_miss"] == 1.0  # row 1 of step 1 was rejected
    assert result["realized_sparsity"] == 1 - 5 / 7
    assert result["effective_sparsity"] == 2 / 14

    result = run(speculative_trace(1, rejected), "0.5")
    assert result["mean_miss"] == 0.5
    assert result["p99_miss"] == pytest.approx(0.99)


def test_row0_mask_adds_each_rows_newest_block():
    result = run(speculative_trace(0, [0.0] * 7), "0.5", mask="row0")
    assert result["steps"][1]["blocks"] == [0, 2, 5, 6]
    assert result["steps"][1]["budget"] == [3, 4]
    assert result["steps"][1]["miss"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("accepted", "update", "row0_block"),
    [(0, "prefix", 2), (1, "prefix", 1), (1, "row0", 2)],
)
def test_update_replays_the_accepted_prefix(accepted, update, row0_block):
    # Row 1's 90 at slot 1 counts only when it is accepted and committed.
    trace = speculative_trace(0, [0.0, 90, 0, 0, 0, 0, 0], accepted_first=accepted)
    result = run(trace, "0.5", mask="row0", update=update)
    assert result["steps"][1]["blocks"] == [0, row0_block, 5, 6]


def test_accepted_rows_are_replayed_in_order():
    # Slot 1: 0 then 8 -> 4. Slot 2: 8 then 2 -> 4 then 3. Backwards it would be 2 and 4.5.
    scores = [[[0.0, 0, 8, 0], [0, 8.0, 2, 0]], [[0.0] * 4] * 2]
    trace = make_trace(scores, [[3, 3]] * 2, [[4, 4]] * 2)
    assert blocks_of(run(trace, "0.25"))[1] == [0, 1, 3]


# --- Variants -------------------------------------------------------------------------------


def test_a0_picks_slots_then_expands():
    # Budget ceil(0.25 * 8) = 2 slots: 2 and 3, both in block 1; forced 0 and 3 come on top.
    trace = one_row([[0, 0, 4, 3, 2, 0, 0, 0]] * 2, q=[7, 7])
    result = run(trace, "0.75", variant="A0", block_size=2, top_k=4)
    assert [step["budget"] for step in result["steps"]] == [[8], [2]]
    assert blocks_of(result)[1] == [0, 1, 3]
    assert result["steps"][1]["miss"] == [0.25]  # slots 2, 3, 4, 0: block 2 was skipped


def test_a0_slot_budget_is_exact_and_ties_go_low():
    # ceil(0.3 * 10) = 3 slots (float64: 4); all tie: slots 0, 1, 2 and the forced block 9.
    trace = one_row([[0.0] * 10] * 2, q=[9, 9])
    result = run(trace, "0.7", variant="A0")
    assert blocks_of(result)[1] == [0, 1, 2, 9]
    assert result["steps"][1]["budget"] == [3]


@pytest.mark.parametrize(
    ("block1", "pooling", "expected"),
    [
        ((4.0, 0.0), "max", [0, 1, 3]),  # 4 against 3
        ((4.0, 0.0), "mean", [0, 2, 3]),  # 2 against 3
        ((4.0, 0.0), "top4", [0, 2, 3]),
        ((4.0, NAN), "mean", [0, 1, 3]),  # divided by the one present
        ((4.0, INF), "max", [0, 1, 3]),
        ((NAN, NAN), "max", [0, 2, 3]),  # nothing observed
    ],
)
def test_a2_pools_finite_scores_before_the_average(block1, pooling, expected):
    trace = one_row([[0, 0, *block1, 3, 3, 0, 0], [0] * 8], q=[7, 7])
    result = run(trace, "0.25", variant="A2", pooling=pooling, block_size=2)
    assert blocks_of(result)[1] == expected


@pytest.mark.parametrize(
    ("scores", "positions"),
    [
        # floor(-1 / 2) = -1, so D[-1] holds block 0's 4; at q = 1 it points at block 1, which
        # beats block 2's 1. Truncation to 0 would leave it on block 0.
        ([8, 8, 0, 0, 2, 2, 0, 0], (-1, 1)),
        # D[-2] holds block 2's 2; at q = -1 it points at block 1, which ties with block 2 and
        # is lower. Truncation would leave it on block 2.
        ([0, 0, 2, 2, 4, 4, 0, 0], (1, -1)),
    ],
    ids=["update", "prediction"],
)
def test_a2_diagonal_floors_negative_positions(scores, positions):
    trace = one_row([scores, [0] * 8], q=list(positions))
    result = run(trace, "0.25", variant="A2", block_size=2)
    assert blocks_of(result)[1] == [0, 1, 3]


# --- Errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"variant": "A0", "exploration": "0.1"}, "exploration"),
        ({"variant": "A0", "exploration": "0.1", "policy": "none"}, "exploration"),
        ({"variant": "A0", "budgets": [1, 1]}, "budgets"),
        ({"budgets": [1]}, "budgets"),
        ({"policy": "newest"}, "policy"),
        ({"sparsity": "1.5"}, "sparsity"),
        ({"probe_period": 0}, "probe_period"),
    ],
)
def test_bad_options_are_refused(changed, named):
    trace = one_row([[0.0] * 4] * 2, q=[3, 3])
    with pytest.raises(ValueError, match=named):
        replay(trace, **{"sparsity": "0.5", "exploration": "0", **changed})
