"""A step of all layers: who takes part, and whose history it is."""

from itertools import pairwise

import pytest
import torch

from spin_server.algorithm.options import HistoryType, SpinOptions
from spin_server.engine.spin.layers import OUTCOMES, SpinLayers, history_bytes
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import RequestTracker
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

HALF = Policy(
    sparsity=Ratio.parse("sparsity", "0.5"),
    exploration=Ratio.parse("exploration", "0"),
)
BLOCK, TOP_K, SLOTS = 4, 8, 40
LAYERS = (1, 3)


def spin_layers(num_states: int = 4, dense_slots: int = TOP_K) -> SpinLayers:
    return SpinLayers(
        LAYERS,
        SpinOptions(block_size=BLOCK, top_k=TOP_K),
        PolicyTable(4, HALF),
        num_states=num_states,
        max_slots=80,
        compress_ratio=4,
        dense_slots=dense_slots,
    )


def step(
    spin: SpinLayers, tracker: RequestTracker, requests: dict[str, tuple[int, torch.Tensor]]
) -> list[list[list[int]]]:
    """Decode one token of each request, whose dense scores are given; layers' scored blocks.

    Every layer gets the scores rolled by as many blocks as its place in LAYERS.
    """
    rows = tracker.step([(name, position, 1) for name, (position, _) in requests.items()])
    num_slots = (rows.positions + 1) // 4
    spin.begin(rows)
    chosen = []
    for index, layer in enumerate(LAYERS):
        plan = spin.plan(layer, rows, num_slots)
        blocks = [b[b >= 0].tolist() for b in plan.blocks]
        scores = torch.full((len(requests), plan.blocks.shape[1] * BLOCK), torch.nan)
        for row, (_, dense) in enumerate(requests.values()):
            rolled = dense.roll(index * BLOCK)
            for place, block in enumerate(blocks[row]):
                part = rolled[block * BLOCK : (block + 1) * BLOCK]
                scores[row, place * BLOCK : place * BLOCK + len(part)] = part
            visible = [min(BLOCK, int(num_slots[row]) - b * BLOCK) for b in blocks[row]]
            assert int(plan.lengths[row]) == sum(visible)
        dense = [len(b) == -(-int(n) // BLOCK) for b, n in zip(blocks, num_slots, strict=True)]
        assert not any(plan.fresh.tolist()) or all(dense[row] for row in plan.active[plan.fresh])
        spin.learn(layer, scores)
        chosen.append(blocks)
    return chosen


def signature(block: int) -> torch.Tensor:
    """Scores that are high in one block."""
    scores = torch.zeros(SLOTS + 4)
    scores[block * BLOCK : (block + 1) * BLOCK] = 9.0
    return scores


def test_context_up_to_the_threshold_is_dense_and_its_history_starts_past_it() -> None:
    spin, tracker = spin_layers(dense_slots=30), RequestTracker(4)
    tracker.admit("a", policy=0, key=0, num_known_tokens=118)
    kept = []
    for position in range(118, 130):  # 29 to 32 slots
        (blocks,) = step(spin, tracker, {"a": (position, signature(2))})[0]
        kept.append(len(blocks))
    # Up to 30 slots, then the history's first step, and from then on half of 8 blocks.
    assert kept == [8] * 6 + [4] * 6
    assert spin.fallbacks.tolist() == [0, 5 * len(LAYERS), 0, 0]


def test_every_request_follows_its_own_signature_through_joins_and_leaves() -> None:
    spin, tracker = spin_layers(num_states=2), RequestTracker(2)
    quarter = Policy(sparsity=Ratio.parse("s", "0.75"), exploration=Ratio.parse("e", "0"))
    spin.table.write(0, quarter)
    marks = {"a": 3, "b": 5, "c": 6, "d": 4}
    live: dict[str, int] = {}

    def decode() -> list[dict[str, list[int]]]:
        given = {r: (p, signature(marks[r])) for r, p in live.items()}
        chosen = step(spin, tracker, given)
        for request in live:
            live[request] += 1
        return [dict(zip(given, blocks, strict=True)) for blocks in chosen]

    for joins, leaves in (("ab", "a"), ("c", "b"), ("d", "cd"), ("ab", "")):
        for request in joins:
            tracker.admit(request, policy=0, key=0, num_known_tokens=160)
            live[request] = 160
        for first in decode():
            assert all(first[r] == list(range(10)) for r in joins), "the first step is dense"
        for _ in range(3):
            for index, chosen in enumerate(decode()):
                for request, blocks in chosen.items():
                    # Three blocks of ten or eleven: the sink, its own mark, the newest.
                    newest = (live[request] // 4 - 1) // BLOCK
                    assert blocks == [0, marks[request] + index, newest], request
        for request in leaves:
            tracker.finish(request)
            del live[request]


@pytest.mark.parametrize(("history", "size"), [("float32", 4), ("bfloat16", 2)])
def test_histories_take_what_was_announced(history: HistoryType, size: int) -> None:
    options = SpinOptions(history=history)
    spin = SpinLayers(
        LAYERS,
        options,
        PolicyTable(1, HALF),
        num_states=3,
        max_slots=1000,
        compress_ratio=4,
        dense_slots=options.top_k,
    )
    announced = history_bytes(len(LAYERS), num_states=3, max_slots=1000, history=history)
    assert spin.num_bytes == announced
    # Each: 16 blocks of 64 slots for V, 1,001 offsets for D, 8 bytes a block and for the step.
    assert spin.num_bytes == len(LAYERS) * 3 * (size * (1024 + 1001) + 8 * (16 + 1))


def test_rows_without_a_history_are_scored_densely_and_teach_nothing() -> None:
    spin, tracker = spin_layers(), RequestTracker(4)
    tracker.admit("prompt", policy=0, key=0, num_known_tokens=200)
    tracker.admit("short", policy=0, key=0, num_known_tokens=4)
    # A prompt's single-token tail, and a context of 8 slots, which the indexer keeps whole.
    given = {"prompt": (160, signature(2)), "short": (33, signature(1))}
    assert step(spin, tracker, given) == [[list(range(10)), [0, 1]]] * len(LAYERS)
    assert not spin.state.vertical.any()
    assert spin.state.steps.tolist() == [0] * 8
    assert not spin.outcomes.any()
    assert spin.fallbacks.tolist() == [2, 2, 0, 0]


def test_outcomes_count_every_block_once() -> None:
    spin, tracker = spin_layers(), RequestTracker(4)
    tracker.admit("a", policy=0, key=0, num_known_tokens=160)
    for position in (160, 161, 162):
        step(spin, tracker, {"a": (position, signature(3))})
    # One dense step of ten blocks, then two that keep five of ten.
    assert dict(zip(OUTCOMES, spin.outcomes[1].tolist(), strict=True)) == {
        "exploit": 6,
        "explore": 0,
        "forced": 4,
        "skipped": 10,
        "dense": 10,
    }


def test_policy_written_in_place_applies_at_the_next_step() -> None:
    spin, tracker = spin_layers(), RequestTracker(4)
    tracker.admit("a", policy=2, key=0, num_known_tokens=160)
    assert len(step(spin, tracker, {"a": (160, signature(3))})[1][0]) == 10
    assert len(step(spin, tracker, {"a": (161, signature(3))})[1][0]) == 5
    before = spin.table.columns.sparsity.data_ptr()
    spin.table.write(2, Policy(sparsity=Ratio.parse("sparsity", "0.7")))
    assert len(step(spin, tracker, {"a": (162, signature(3))})[1][0]) == 3
    assert spin.table.columns.sparsity.data_ptr() == before
    assert spin.table.revision == 1


def test_history_starts_anew_though_the_first_step_scores_nothing() -> None:
    spin, tracker = spin_layers(), RequestTracker(1)
    tracker.admit("before", policy=0, key=0, num_known_tokens=160)
    for position in (160, 161):
        step(spin, tracker, {"before": (position, signature(3))})
    tracker.finish("before")
    tracker.admit("short", policy=0, key=0, num_known_tokens=34)
    # Up to K slots vLLM does not call the indexer, so the layers never see this step.
    rows = tracker.step([("short", 34, 1)])
    assert len(rows.resets) == 1
    spin.begin(rows)
    assert spin.fallbacks.tolist() == [0, 2, 0, 0]
    # The first step with more than K slots is the first of this history: dense.
    assert step(spin, tracker, {"short": (35, signature(1))}) == [[[0, 1, 2]]] * len(LAYERS)


def test_request_without_a_place_is_scored_densely_until_one_is_free() -> None:
    spin, tracker = spin_layers(num_states=1), RequestTracker(1)
    for name in "ab":
        tracker.admit(name, policy=0, key=0, num_known_tokens=160)
    for position in (160, 161, 162):
        given = {"a": (position, signature(3)), "b": (position, signature(3))}
        for blocks in step(spin, tracker, given):
            assert len(blocks[0]) == (10 if position == 160 else 5)
            assert len(blocks[1]) == 10
    assert spin.fallbacks.tolist() == [0, 0, 3 * len(LAYERS), 0]
    tracker.finish("a")
    assert [len(b[0]) for b in step(spin, tracker, {"b": (163, signature(3))})] == [11, 11]
    assert [len(b[0]) for b in step(spin, tracker, {"b": (164, signature(3))})] == [6, 6]
    assert tracker.num_resets["prefill"] == 2


def test_digest_tells_what_the_last_step_chose_and_what_each_layer_remembers() -> None:
    def run(seed: int) -> list[dict[str, list[int]]]:
        policy = Policy(
            sparsity=Ratio.parse("sparsity", "0.5"), exploration=Ratio.parse("exploration", "0.5")
        )
        options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=seed)
        spin = SpinLayers(
            LAYERS,
            options,
            PolicyTable(4, policy),
            num_states=4,
            max_slots=80,
            compress_ratio=4,
            dense_slots=TOP_K,
        )
        tracker, found = RequestTracker(4), [spin.digest()]
        tracker.admit("a", policy=0, key=7, num_known_tokens=160)
        for position in range(160, 166):
            scores = torch.arange(SLOTS + 5.0).sin()
            step(spin, tracker, {"a": (position, scores)})
            found.append(spin.digest())
        spin.begin(tracker.step([]))
        found.append(spin.digest())
        spin.state.diagonal[-1, 0] = 9.0
        found.append(spin.digest())
        return found

    found = run(0)
    assert found == run(0)
    before, *steps, idle, changed = found
    assert before["choices"] == idle["choices"] == [0, 0]  # nothing was planned
    assert (
        idle["histories"]
        == steps[-1]["histories"]
        == [
            *changed["histories"][:1],
            idle["histories"][1],
        ]
    )
    assert changed["histories"][1] != idle["histories"][1]
    assert all(a["histories"] != b["histories"] for a, b in pairwise(steps))
    other = run(1)
    assert other[1] == found[1]  # the first step is dense
    assert other[-3] != found[-3]
