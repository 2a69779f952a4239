"""The oracle against examples worked out by hand, and the trace factory's promises.

No expected value here was obtained by running the oracle.
"""

import math
from fractions import Fraction
from typing import Any

import brute_force
import numpy as np
import pytest
from brute_force import (
    Options,
    Row,
    State,
    block_budget,
    decay_towards,
    exploration_count,
    exploration_draw,
    observe,
    philox4x32_10,
    pool,
    replay,
    splitmix64,
)
from trace_factory import random_trace

INF = math.inf
NAN = math.nan
KEY_ZERO = 0xE220A8397B1DCDAF  # splitmix64(0): with seed 0 this request key makes the key 0


def make_trace(
    scores: list[list[list[float]]],
    q: list[list[int]],
    n: list[list[int]],
    accepted: list[int] | None = None,
    turns: tuple[int, ...] = (),
) -> dict[str, np.ndarray]:
    """A trace from nested lists [steps][rows][slots]; every row is valid unless told."""
    steps, rows = len(scores), len(scores[0])
    return {
        "scores": np.array(scores, dtype=np.float32),
        "query_positions": np.array(q, dtype=np.int64),
        "context_slots": np.array(n, dtype=np.int64),
        "accepted": np.array([rows - 1] * steps if accepted is None else accepted, np.int64),
        "turn_starts": np.array([t in turns for t in range(steps)]),
    }


def one_row(
    scores: list[list[float]], q: list[int], n: list[int] | None = None, **more: Any
) -> dict[str, np.ndarray]:
    """A trace of one row a step; by default every slot is visible."""
    contexts = [len(scores[0])] * len(scores) if n is None else n
    return make_trace([[s] for s in scores], [[p] for p in q], [[c] for c in contexts], **more)


def options(**changed: Any) -> Options:
    """The default options, with block and top-K sizes of 1."""
    values: dict[str, Any] = {
        "sparsity": Fraction(0), "exploration": Fraction(0), "policy": "random", "pooling": "max",
        "variant": "A1", "ema_decay": 0.5, "block_size": 1, "top_k": 1, "seed": 0,
        "mask": "union", "update": "prefix", "request_key": 0, "layer": 0,
    }  # fmt: skip
    return Options(**{**values, **changed})


def run(trace: dict[str, np.ndarray], sparsity: str, exploration: str = "0", **more: Any) -> dict:
    """Replay with block and top-K sizes of 1 unless told."""
    return replay(
        trace, sparsity=sparsity, exploration=exploration, **{"block_size": 1, "top_k": 1, **more}
    )


def blocks_of(result: dict[str, Any]) -> list[list[int]]:
    return [step["blocks"] for step in result["steps"]]


# --- Randomness -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_matches_random123_known_answers(counter, key, expected):
    assert philox4x32_10(counter, key) == expected


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0, 0xE220A8397B1DCDAF),
        (0x9E3779B97F4A7C15, 0x6E789E6AA1B965F4),
        (1234567, 6457827717110365317),
    ],
)
def test_splitmix64_matches_known_outputs(x, expected):
    assert splitmix64(x) == expected


@pytest.mark.parametrize(
    ("block", "query_position", "layer", "key", "expected"),
    [
        (0, 0, 0, 0, 0x6627E8D5),
        (0xFFFFFFFF, -1, 0xFFFFFFFF, 2**64 - 1, 0x408F276D),
        (0x243F6A88, 0x0370734485A308D3, 0x13198A2E, 0x299F31D0A4093822, 0xD16CFE09),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_draw_places_every_word_of_counter_and_key(block, query_position, layer, key, expected):
    draw = exploration_draw(
        block, query_position=query_position, layer=layer, seed=0, request_key=key ^ KEY_ZERO
    )
    assert draw == expected


def test_random_exploration_takes_lowest_draws_and_breaks_ties_by_index(monkeypatch):
    draws = {1: 9, 2: 5, 3: 1, 4: 5, 5: 7}
    monkeypatch.setattr(brute_force, "exploration_draw", lambda block, **_: draws[block])
    trace = one_row([[0.0] * 7] * 2, q=[6, 6])
    # B = 7, m = ceil(4/7 * 7) = 4 by override, e = min(floor(0.5 * 4), 4 - 2) = 2: the forced
    # 0 and 6, then block 3 (draw 1) and of 2 and 4 (both draw 5) the lower.
    result = run(trace, "0.5", "0.5", budgets=[4, 4])
    assert blocks_of(result)[1] == [0, 2, 3, 6]


# --- Budgets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sparsity", "context", "block_size", "top_k", "replacement", "expected"),
    [
        ("0.7", 10, 1, 1, None, 3),  # float64 says ceil(0.3 * 10) = 4
        ("0.9", 30, 1, 1, None, 3),  # float64 says 1 - 0.9 = 0.09999999999999998
        ("0.4", 1000, 1, 1, None, 600),
        ("0.4", 1001, 1, 1, None, 601),  # 600.6
        ("0.9", 10, 1, 1, None, 2),  # the two forced blocks win over m = 1
        ("1", 10, 1, 1, None, 2),
        ("1", 1, 1, 1, None, 1),  # one block is both sink and newest
        ("0.99", 6400, 64, 512, None, 8),  # ceil(K / b)
        ("0.99", 6400, 64, 513, None, 9),
        ("0", 6401, 64, 512, None, 101),  # partial newest block
        ("0.5", 150, 64, 512, None, 3),  # min with B
        ("0.5", 0, 64, 512, None, 0),
        ("0.5", 10, 1, 1, 7, 7),
        ("0.5", 10, 1, 4, 3, 4),  # a replacement still meets ceil(K / b),
        ("0.5", 10, 1, 1, 99, 10),  # B
        ("0.5", 10, 1, 1, 0, 2),  # and the forced blocks
    ],
)
def test_block_budget_is_exact(sparsity, context, block_size, top_k, replacement, expected):
    chosen = options(sparsity=Fraction(sparsity), block_size=block_size, top_k=top_k)
    assert block_budget(context, chosen, replacement) == expected


@pytest.mark.parametrize(
    ("exploration", "policy", "budget", "num_forced", "expected"),
    [
        ("0", "random", 10, 2, 0),
        ("0.05", "random", 10, 2, 1),  # max(1, floor(0.5))
        ("0.3", "random", 10, 2, 3),
        ("0.29", "random", 100, 2, 29),  # float64 says 28.999999999999996
        ("1", "random", 5, 2, 3),  # capped by m - forced
        ("0.5", "random", 2, 2, 0),
        ("0.5", "random", 1, 1, 0),
        ("0.5", "random", 0, 0, 0),
        ("0.5", "none", 10, 2, 0),
    ],
)
def test_exploration_count_is_exact(exploration, policy, budget, num_forced, expected):
    chosen = options(exploration=Fraction(exploration), policy=policy)
    assert exploration_count(budget, num_forced, chosen) == expected


def test_budgets_replace_the_share_per_step():
    trace = one_row([[0.0] * 10] * 3, q=[9, 9, 9])
    result = run(trace, "0.7", budgets=[1, 5, 99])
    assert [step["budget"] for step in result["steps"]] == [[10], [5], [10]]
    assert blocks_of(result)[1] == [0, 1, 2, 3, 9]


# --- Moving averages and pooling ------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "pooling", "expected"),
    [
        ([-3, 5, 2], "max", 5.0),
        ([1, 5, 2, 3, 4], "top4", 3.5),
        ([1, 2], "top4", 1.5),
        ([1, 5, 2, 3, 4], "mean", 3.0),
        ([-1], "mean", -1.0),
        ([2**24, 1, 1], "mean", (2**24 + 2) / 3),  # float32 would lose both ones
    ],
)
def test_pool(values, pooling, expected):
    assert pool([np.float32(v) for v in values], pooling) == expected


def test_ema_rounds_to_float32():
    # 0.5 * 2^25 + 0.5 * 2 = 2^24 + 1, a tie that rounds to the even 2^24.
    updated = decay_towards(np.float32(2**25), np.float32(2), 0.5)
    assert isinstance(updated, np.float32)
    assert updated == 2**24


@pytest.mark.parametrize(("old", "observed", "decay"), [(2**24 - 1, 1, 0.75), (1, 2**24 - 1, 0.25)])
def test_ema_rounds_each_product(old, observed, decay):
    # 0.75 * (2^24 - 1) = 12582911.25 rounds to 12582911; plus 0.25 rounds to 12582911 again.
    # Unrounded products would give 12582911.5 and so 12582912.
    assert decay_towards(np.float32(old), np.float32(observed), decay) == 12582911


def test_ema_decay_weighs_the_past():
    state = State()
    for z in (8.0, 4.0):
        row = Row(scores=[np.float32(z)], query_position=3, context=1)
        observe(state, row, [0], options(ema_decay=0.25))
    # 0.75 * 8 = 6; 0.25 * 6 + 0.75 * 4 = 4.5
    assert state.vertical == {0: 4.5}
    assert state.diagonal == {3: 4.5}


def test_observe_takes_finite_visible_scored_slots_only():
    scores = [np.float32(v) for v in (2, NAN, INF, -INF, 6, 8, 10, 12)]
    state = State(num_steps=5)
    row = Row(scores=scores, query_position=-1, context=5)
    observe(state, row, [0, 1, 2, 3], options(block_size=2))
    assert state.vertical == {0: 1.0, 4: 3.0}
    assert state.diagonal == {-1: 1.0, -5: 3.0}  # no clamp, no wrap
    assert state.last_seen == {0: 5, 2: 5}  # block 1 had nothing finite, block 3 is hidden


def test_prediction_follows_vertical_and_pools_visible_slots():
    # V = D after step 0 = halves: blocks of two predict 0, 2, 1, 4. m = ceil(0.75 * 4) = 3.
    trace = one_row([[0, 0, 4, 0, 0, 2, 8, 0], [9, 1, 1, 1, 8, 1, 1, 1]], q=[7, 7])
    result = run(trace, "0.25", block_size=2, top_k=2)
    assert result["steps"][0] == {
        "blocks": [0, 1, 2, 3], "scored_blocks": 4, "budget": [4], "miss": [0.0], "dense": True
    }  # fmt: skip
    # Dense top-2 of step 1 is slots 0 and 4; block 2 was skipped.
    assert result["steps"][1] == {
        "blocks": [0, 1, 3], "scored_blocks": 3, "budget": [3], "miss": [0.5], "dense": False
    }  # fmt: skip
    assert result["mean_miss"] == 0.5
    assert result["p99_miss"] == 0.5
    assert result["realized_sparsity"] == 0.25
    assert result["effective_sparsity"] == 1 / 8
    assert result["target_sparsity"] == 0.25


@pytest.mark.parametrize(
    ("next_q", "expected"),
    [
        (5, [0, 1, 3]),  # D[2] points at slot 3: block 1 ties with block 2 and is lower
        (9, [0, 2, 3]),  # D[2] points at slot 7; V[5] keeps block 2 over block 1
    ],
)
def test_prediction_follows_diagonal(next_q, expected):
    trace = one_row([[0, 0, 0, 0, 0, 2, 0, 0], [0] * 8], q=[7, next_q])
    assert blocks_of(run(trace, "0.25", block_size=2))[1] == expected


@pytest.mark.parametrize(
    ("next_q", "expected"),
    [
        (5, [0, 3, 4]),  # V and D both -0.5 on slots 0-5; block 3 is new and predicts 0
        (100, [0, 1, 4]),  # every D[q - i] is new: all predict 0, the tie goes to block 1
    ],
)
def test_unobserved_slots_predict_zero_and_outrank_negative(next_q, expected):
    trace = one_row([[-1.0] * 10] * 2, q=[5, next_q], n=[6, 10])
    assert blocks_of(run(trace, "0.4", block_size=2))[1] == expected  # m = 0.6 * 5 = 3


def test_skipped_blocks_are_frozen():
    # m = 3: one block beside 0 and 4. After step 0: S = 0, 4, 3, 0, 0.
    scores = [[0, 8, 6, 0, 0], [0, 0, 9, 0, 0], [0, 0, 9, 0, 0]]
    result = run(one_row(scores, q=[4, 4, 4]), "0.4")
    # Step 1 scores block 1 (4 -> 2); block 2 keeps its 3 and wins step 2.
    assert blocks_of(result)[1:] == [[0, 1, 4], [0, 2, 4]]


@pytest.mark.parametrize("hole", [NAN, INF, -INF])
def test_holes_are_neither_observed_nor_in_the_dense_top_k(hole):
    # Block 1 stays at 0 and loses to block 2; at step 1 its hole is no dense top-K slot.
    scores = [[0, hole, 2, 0], [-1, hole, 5, -1]]
    result = run(one_row(scores, q=[3, 3]), "0.25", top_k=3)
    assert blocks_of(result)[1] == [0, 2, 3]
    assert result["steps"][1]["miss"] == [0.0]


def test_slots_beyond_the_context_do_not_exist():
    scores = [[0, 1, 2, 0, 3e38, 3e38]] * 2
    result = run(one_row(scores, q=[3, 3], n=[4, 4]), "0.25")
    assert blocks_of(result) == [[0, 1, 2, 3], [0, 2, 3]]
    assert result["mean_miss"] == 0.0


@pytest.mark.parametrize(
    ("slots_1_and_2", "missed"), [((-0.0, 0.0), 1.0), ((0.0, -0.0), 1.0), ((-1.0, 0.0), 0.0)]
)
def test_dense_top_k_ties_by_numeric_equality_to_the_lower_slot(slots_1_and_2, missed):
    # Step 0 makes block 2 the prediction; slot 1 is skipped at step 1.
    trace = one_row([[0, 0, 2, 0], [-1, *slots_1_and_2, -1]], q=[3, 3])
    result = run(trace, "0.25")
    assert blocks_of(result)[1] == [0, 2, 3]
    assert result["steps"][1]["miss"] == [missed]


def test_miss_divides_by_the_slots_found():
    # K = 3, but only slots 1 and 2 are finite; block 1 is skipped: 1 of 2.
    trace = one_row([[0, 0, 2, 0, 0, 0], [NAN, 1, 1, NAN, NAN, NAN]], q=[5, 5])
    result = run(trace, "0.5", top_k=3)
    assert blocks_of(result)[1] == [0, 2, 5]
    assert result["steps"][1]["miss"] == [0.5]


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


# --- Random traces --------------------------------------------------------------------------


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
