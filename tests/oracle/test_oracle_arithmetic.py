"""The oracle's draws, budgets, averages and pooling, against values worked out by hand.

No expected value here was obtained by running the oracle.
"""

import math
from fractions import Fraction

import brute_force
import numpy as np
import pytest
from brute_force import (
    Row,
    State,
    block_budget,
    decay_towards,
    exploration_count,
    observe,
    pool,
)
from random_draws import exploration_draw, philox4x32_10, splitmix64
from worked_examples import blocks_of, one_row, options, run

INF = math.inf
NAN = math.nan
KEY_ZERO = 0xE220A8397B1DCDAF  # splitmix64(0): with seed 0 this request key makes the key 0

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
        row = Row(scores=[np.float32(z)], query_position=3, context=1, draw_position=3)
        observe(state, row, [0], options(ema_decay=0.25))
    # 0.75 * 8 = 6; 0.25 * 6 + 0.75 * 4 = 4.5
    assert state.vertical == {0: 4.5}
    assert state.diagonal == {3: 4.5}


def test_observe_takes_finite_visible_scored_slots_only():
    scores = [np.float32(v) for v in (2, NAN, INF, -INF, 6, 8, 10, 12)]
    state = State(num_steps=5)
    row = Row(scores=scores, query_position=-1, context=5, draw_position=-1)
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
