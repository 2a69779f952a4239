"""The GPU's layers under speculation choose and remember what the definition does."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spin_server.algorithm.options import HistoryType, MaskSharing, SpinOptions, UpdateRule
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import (
    StepInputs,
    StepPlan,
    commit_step,
    gather_scores,
    plan_step,
)
from spin_server.engine.spin.device import device_bytes
from spin_server.engine.spin.device_drafts import DraftedLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import RequestTracker, StepRows
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, BLOCK, TOP_K, DENSE, SLOTS, STATES = (1, 4), 8, 24, 30, 120, 3
WIDTH = SLOTS // BLOCK
POLICIES = [
    Policy(),
    Policy(sparsity=Ratio.parse("s", "0.5"), exploration=Ratio.parse("e", "0.3")),
    Policy(sparsity=Ratio.parse("s", "0.65"), exploration_policy="block_age", probe_period=3),
    Policy(
        sparsity=Ratio.parse("s", "0.4"),
        exploration=Ratio.parse("e", "0.2"),
        exploration_policy="staleness",
    ),
]


@pytest.fixture(autouse=True)
def dtype_of_vllm() -> Iterator[None]:
    """vLLM builds its model, and so these layers, with another default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def table() -> PolicyTable:
    policies = PolicyTable(len(POLICIES), POLICIES[0], DEVICE)
    for index, policy in enumerate(POLICIES[1:], start=1):
        policies.write(index, policy)
    return policies


def drafted_layers(options: SpinOptions, drafts: int, **sizes: int) -> DraftedLayers:
    """Layers on the device; for one request with one slot per token, unless asked otherwise."""
    given = {
        "num_states": 1,
        "num_rows": 1,
        "max_slots": SLOTS,
        "compress_ratio": 1,
        "dense_slots": DENSE,
        **sizes,
    }
    return DraftedLayers(LAYERS, options, table(), device=DEVICE, num_drafts=drafts, **given)


@dataclass
class Request:
    position: int
    policy: int
    key: int
    rejected: int = 0  # of the last step's drafts


class Definition:
    """One request's histories in every layer, in plain torch."""

    def __init__(self, options: SpinOptions, ratio: int) -> None:
        self.options, self.ratio = options, ratio
        self.state = SpinState.zeros(
            len(LAYERS),
            num_positions=SLOTS,
            num_offsets=SLOTS + 1,
            num_blocks=WIDTH,
            history=options.history,
        )
        self.pending: tuple[PolicyRows, StepInputs, StepPlan] | None = None

    def plan(self, request: Request, num_rows: int) -> StepPlan | None:
        """The step's plan; None where it is none of SPIN's."""
        positions = request.position + torch.arange(num_rows)
        num_slots = (positions + 1) // self.ratio
        if num_slots[0] <= DENSE:
            return None
        queries = (positions // self.ratio).expand(len(LAYERS), -1)
        policies = PolicyRows.of([POLICIES[request.policy]] * len(LAYERS))
        inputs = StepInputs(
            state_rows=torch.arange(len(LAYERS)),
            query_positions=queries,
            num_slots=num_slots.expand(len(LAYERS), -1),
            request_keys=torch.full((len(LAYERS),), request.key),
            layers=torch.tensor(LAYERS),
            diagonal_positions=queries,
        )
        plan = plan_step(self.options, policies, self.state, inputs, width=WIDTH)
        self.pending = policies, inputs, plan
        return plan

    def commit(self, scores: Tensor, accepted: int) -> None:
        """Learn from [layers, rows, slots] once the verdict is known."""
        assert self.pending is not None
        policies, inputs, plan = self.pending
        commit_step(
            self.options,
            policies,
            self.state,
            inputs,
            plan,
            gather_scores(scores, plan.blocks, BLOCK),
            torch.full((len(LAYERS),), accepted),
        )


def run_layers(
    layers: DraftedLayers,
    num_slots: list[list[int]],
    scores: list[Tensor],
    *,
    each: bool,
    table_by_row: bool,
) -> list[list[list[int]]]:
    """Run a step of every layer; the blocks that each request scored in each.

    Args:
        num_slots: of each request's rows.
        scores: of each request: [layers, rows, slots].
        each: plan layer by layer, as in one graph.
        table_by_row: hand over a block table with a row for each row, as where rows are flattened.
    """
    counts = [len(rows) for rows in num_slots]
    flat = torch.tensor([n for rows in num_slots for n in rows], dtype=torch.int32, device=DEVICE)
    even = len(set(counts)) == 1 and not table_by_row
    shape = (len(counts), counts[0]) if even else (len(flat), 1)
    pages = torch.arange(WIDTH, dtype=torch.int32, device=DEVICE)
    pages = pages.expand(len(counts) if even else len(flat), -1)
    row_counts = None
    if len(set(counts)) > 1:
        row_counts = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    asked = {"num_requests": len(counts), "row_counts": row_counts}
    if not each:
        layers.plan(flat, pages, **asked)
    chosen = []
    for index, layer in enumerate(LAYERS):
        if each:
            layers.plan(flat, pages, first=index, count=1, beside=True, **asked)
        lengths = layers.lengths(layer, torch.Size(shape)).flatten().tolist()
        found = layers.table(layer, pages)
        compact = torch.full((len(flat), max(1, *lengths)), 7.0, device=DEVICE, dtype=torch.float32)
        best = torch.full((len(flat), TOP_K), -1, dtype=torch.int32, device=DEVICE)
        blocks: list[list[int]] = []
        row = 0
        for request, own in enumerate(num_slots):
            # The last row sees every listed block.
            count = -(-lengths[row + len(own) - 1] // BLOCK)
            listed = found[request if even else row, :count].tolist()
            blocks.append(listed)
            for inner, n in enumerate(own):
                slots = [b * BLOCK + i for b in listed for i in range(BLOCK)]
                slots = [slot for slot in slots if slot < n]
                assert lengths[row] == len(slots)
                compact[row, : len(slots)] = scores[request][index, inner, slots].to(DEVICE)
                count = min(len(slots), TOP_K)
                best[row, :count] = torch.arange(count, dtype=torch.int32)
                row += 1
        layers.remap(layer, best)
        row = 0
        for listed, own in zip(blocks, num_slots, strict=True):
            slots = [b * BLOCK + i for b in listed for i in range(BLOCK)]
            for n in own:
                wanted = [slot for slot in slots if slot < n][:TOP_K]
                assert best[row][best[row] >= 0].tolist() == wanted
                row += 1
        layers.learn(layer, compact, beside=each)
        chosen.append(blocks)
    return chosen


@pytest.mark.parametrize(
    ("seed", "ratio", "drafts", "each", "by_row", "history", "sharing", "rule"),
    [
        (0, 4, 3, False, False, "float32", "union", "prefix"),
        (1, 4, 3, True, False, "float32", "union", "prefix"),
        (2, 4, 2, True, True, "float32", "union", "prefix"),
        (3, 1, 5, False, True, "float32", "union", "prefix"),
        (4, 1, 1, True, False, "bfloat16", "union", "prefix"),
        (5, 4, 3, False, False, "float32", "row0", "prefix"),
        (6, 4, 4, True, True, "float32", "union", "row0"),
    ],
)
def test_drafted_layers_equal_the_definition_through_rejections_joins_and_leaves(
    seed: int,
    ratio: int,
    drafts: int,
    each: bool,
    by_row: bool,
    history: HistoryType,
    sharing: MaskSharing,
    rule: UpdateRule,
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    options = SpinOptions(
        block_size=BLOCK,
        top_k=TOP_K,
        seed=9,
        history=history,
        mask_sharing=sharing,
        update_rule=rule,
    )
    device = drafted_layers(
        options, drafts, num_states=STATES, num_rows=STATES + 1, compress_ratio=ratio
    )
    tracker = RequestTracker(STATES, drafts)
    live: dict[str, Request] = {}
    states: dict[str, Definition] = {}
    compared, skipped = 0, 0
    seen_accepted: set[int] = set()
    for step in range(18):
        if len(live) < STATES and rng.random() < 0.5:
            name, start = f"r{step}", rng.randrange(24, 90) * ratio
            live[name] = Request(start, rng.randrange(len(POLICIES)), rng.getrandbits(60))
            states[name] = Definition(options, ratio)
            tracker.admit(
                name, policy=live[name].policy, key=live[name].key, num_known_tokens=start
            )
        if live and rng.random() < 0.1:
            gone = rng.choice(list(live))
            tracker.finish(gone)
            del live[gone]
        if not live:
            continue
        order = rng.sample(list(live), rng.randint(1, len(live)))
        uneven = by_row and rng.random() < 0.5
        counts = [rng.randint(1, 1 + drafts) if uneven else 1 + drafts for _ in order]
        # The host knows late what was rejected, and guesses that nothing was.
        late = [rng.randint(0, live[name].rejected) for name in order]
        rows = tracker.step(
            [
                (name, live[name].position + guess, count)
                for name, guess, count in zip(order, late, counts, strict=True)
            ]
        )
        actual = torch.tensor([live[name].position for name in order], device=DEVICE)
        device.begin(rows, actual)
        accepted = [rng.randint(0, count - 1) for count in counts]
        seen_accepted |= set(accepted)
        verdict = torch.tensor(accepted, dtype=torch.int32, device=DEVICE) + 1
        if scored := step % 5 != 4:  # or vLLM takes all of them for prompts, and scores densely
            num_slots = [
                [(live[name].position + r + 1) // ratio for r in range(count)]
                for name, count in zip(order, counts, strict=True)
            ]
            scores = [
                torch.randn(len(LAYERS), count, SLOTS, generator=generator, dtype=torch.float32)
                for count in counts
            ]
            chosen = run_layers(device, num_slots, scores, each=each, table_by_row=by_row)
        for number, (name, count) in enumerate(zip(order, counts, strict=True)):
            plan = states[name].plan(live[name], count) if scored else None
            for index in range(len(LAYERS) if scored else 0):
                wanted = list(range(-(-num_slots[number][-1] // BLOCK)))
                if plan is not None:
                    compared, skipped = compared + 1, skipped + len(wanted)
                    wanted = plan.blocks[index][plan.blocks[index] >= 0].tolist()
                    skipped -= len(wanted)
                assert chosen[index][number] == wanted, (step, name)
            if plan is not None:
                states[name].commit(scores[number], accepted[number])
            live[name].position += accepted[number] + 1
            live[name].rejected = count - 1 - accepted[number]
        device.judge(verdict)
        live = {n: r for n, r in live.items() if (r.position + drafts + 2) // ratio <= SLOTS}
        for name in [n for n in order if n not in live]:
            tracker.finish(name)
    assert compared > 15
    assert skipped > 30
    assert seen_accepted == set(range(drafts + 1))


def test_the_outcomes_of_a_request_add_up_to_its_blocks() -> None:
    device = drafted_layers(SpinOptions(block_size=BLOCK, top_k=TOP_K), 3)
    tracker = RequestTracker(1, 3)
    tracker.admit("r", policy=1, key=5, num_known_tokens=60)
    position, total = 60, 0
    for _ in range(6):
        device.begin(tracker.step([("r", position, 4)]), torch.tensor([position], device=DEVICE))
        num_slots = [[position + r + 1 for r in range(4)]]
        blocks = run_layers(
            device,
            num_slots,
            [torch.randn(len(LAYERS), 4, SLOTS, dtype=torch.float32)],
            each=False,
            table_by_row=False,
        )
        assert len(blocks[0][0]) <= -(-num_slots[0][-1] // BLOCK)
        total += -(-num_slots[0][-1] // BLOCK)
        device.judge(torch.tensor([4], dtype=torch.int32, device=DEVICE))
        position += 4
    assert device.outcomes.sum(1).tolist() == [total] * len(LAYERS)
    assert device.outcomes[:, :4].min() > 0


def test_a_request_that_starts_anew_learns_nothing_of_the_drafts_before() -> None:
    device = drafted_layers(SpinOptions(block_size=BLOCK, top_k=TOP_K), 1)
    tracker = RequestTracker(1, 1)

    def step(name: str, position: int) -> StepRows:
        rows = tracker.step([(name, position, 2)])
        device.begin(rows, torch.tensor([position], device=DEVICE))
        run_layers(
            device,
            [[position + 1, position + 2]],
            [torch.full((len(LAYERS), 2, SLOTS), 3.0, dtype=torch.float32)],
            each=False,
            table_by_row=False,
        )
        device.judge(torch.tensor([2], dtype=torch.int32, device=DEVICE))
        return rows

    tracker.admit("old", policy=0, key=1, num_known_tokens=60)
    step("old", 60)
    tracker.finish("old")
    tracker.admit("new", policy=0, key=2, num_known_tokens=40)
    assert step("new", 40).resets.tolist() == [0]
    # Once by the new request's first row; the old one's draft would have left 3 * 3 / 4.
    observed = device.histories.vertical[0]
    assert observed[:41].unique().tolist() == [1.5]
    assert not observed[41:].any()


@pytest.mark.parametrize("drafts", [1, 3])
def test_size_with_drafts_is_known_before_anything_is_made(drafts: int) -> None:
    options = SpinOptions()
    sizes = {"num_states": 3, "num_rows": 5, "max_slots": 1000}
    layers = drafted_layers(options, drafts, compress_ratio=4, dense_slots=options.top_k, **sizes)
    sizes["num_policies"] = table().capacity
    taken = device_bytes(len(LAYERS), num_drafts=drafts, **sizes)
    assert layers.num_bytes == taken
    # What is put aside: a score of each slot for each draft of each request and layer, at least.
    scores = len(LAYERS) * 5 * drafts * 1024 * 4
    assert taken - device_bytes(len(LAYERS), **sizes) > scores
