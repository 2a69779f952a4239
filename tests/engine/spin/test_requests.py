"""When a history continues, and when it starts anew."""

import random

import pytest

from spin_server.engine.spin.requests import NO_SLOT, RequestTracker


def admit(tracker: RequestTracker, request: str, prompt: int) -> None:
    tracker.admit(request, policy=0, key=0, num_known_tokens=prompt)


def test_prompt_rows_neither_start_nor_continue_a_history() -> None:
    tracker = RequestTracker(2)
    admit(tracker, "a", 10)
    for position, tokens in ((0, 8), (8, 1), (9, 1)):  # a chunk, then a tail of two single tokens
        rows = tracker.step([("a", position, tokens)])
        assert rows.slots.tolist() == [NO_SLOT]
        assert rows.resets.tolist() == []
    rows = tracker.step([("a", 10, 1)])
    assert rows.slots.tolist() == rows.resets.tolist() != [NO_SLOT]
    assert tracker.step([("a", 11, 1)]).resets.tolist() == []
    assert tracker.num_resets == {"prefill": 1, "preemption": 0, "discontinuity": 0}


def test_skipped_step_continues_and_a_jump_does_not() -> None:
    tracker = RequestTracker(2)
    admit(tracker, "a", 3)
    tracker.step([("a", 3, 1)])
    tracker.step([])  # not scheduled
    assert tracker.step([("a", 4, 1)]).resets.tolist() == []
    for position in (6, 5):  # forwards, backwards
        assert len(tracker.step([("a", position, 1)]).resets) == 1
    assert tracker.num_resets == {"prefill": 1, "preemption": 0, "discontinuity": 2}


def test_preempted_request_gives_its_slot_back_and_starts_anew() -> None:
    tracker = RequestTracker(1)
    admit(tracker, "a", 3)
    tracker.step([("a", 3, 1)])
    tracker.preempt("a")
    assert tracker.num_slots_in_use == 0
    admit(tracker, "b", 1)
    assert tracker.num_slots_in_use == 0  # until it decodes
    assert tracker.step([("b", 1, 1)]).slots.tolist() == [0]
    assert tracker.num_slots_in_use == 1
    tracker.finish("b")
    tracker.resume("a", num_known_tokens=5)
    # What it had generated is computed again as a prompt.
    assert tracker.step([("a", 4, 1)]).slots.tolist() == [NO_SLOT]
    assert len(tracker.step([("a", 5, 1)]).resets) == 1
    assert tracker.num_resets == {"prefill": 2, "preemption": 1, "discontinuity": 0}


def test_same_id_again_is_another_request() -> None:
    tracker = RequestTracker(1)
    admit(tracker, "a", 3)
    tracker.step([("a", 3, 1)])
    admit(tracker, "a", 3)  # a streaming update, or an aborted id sent again
    assert len(tracker.step([("a", 3, 1)]).resets) == 1
    assert tracker.num_slots_in_use == 1


def test_finish_and_preempt_of_an_unknown_request_do_nothing() -> None:
    tracker = RequestTracker(1)
    tracker.finish("nobody")
    tracker.preempt("nobody")
    assert tracker.num_slots_in_use == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost_or_shared_over_a_thousand_requests(seed: int) -> None:
    rng, tracker = random.Random(seed), RequestTracker(8)
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for number in range(1000):
        if len(running) == 8:
            victim = rng.choice(list(running))
            if rng.random() < 0.3:
                waiting[victim] = running.pop(victim)
                tracker.preempt(victim)
            else:
                del running[victim]
                tracker.finish(victim)
        if waiting and rng.random() < 0.5:
            request, position = waiting.popitem()
            if rng.random() < 0.2:
                tracker.finish(request)  # aborted while it waited
            else:
                tracker.resume(request, position)
                running[request] = position
        if len(running) < 8:
            admit(tracker, f"r{number}", 5)
            running[f"r{number}"] = 5
        rows = tracker.step([(r, p, 1) for r, p in running.items()])
        running = {r: p + 1 for r, p in running.items()}
        assert len(set(rows.slots.tolist())) == len(running) == tracker.num_slots_in_use
        assert NO_SLOT not in rows.slots.tolist()
    for request in [*running, *waiting]:
        tracker.finish(request)
    assert tracker.num_slots_in_use == 0


def test_places_do_not_depend_on_the_order_in_which_requests_end() -> None:
    # vLLM names those that ended in a set, whose order is each process's own.
    def places(ended: tuple[str, ...]) -> list[int]:
        tracker = RequestTracker(4)
        for request in "abcd":
            admit(tracker, request, 1)
        tracker.step([(request, 1, 1) for request in "abcd"])
        for request in ended:
            tracker.finish(request)
        for request in "ef":
            admit(tracker, request, 1)
        slots: list[int] = tracker.step([(request, 1, 1) for request in "ef"]).slots.tolist()
        return slots

    assert places(("a", "c")) == places(("c", "a")) == [0, 2]
