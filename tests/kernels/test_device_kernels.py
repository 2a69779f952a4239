"""The device kernels against their references, and against the definition.

Without a GPU they run in Triton's interpreter; with one, compiled.
"""

from dataclasses import fields
from typing import Any

import pytest
import torch
from in_bounds import apart, watch
from torch import Tensor

from spin_kernels import compact_table, history_update, plan_blocks, slot_remap, window_max
from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.compact_table import triton as compact_table_triton
from spin_kernels.history_update import triton as history_update_triton
from spin_kernels.plan_blocks import triton as plan_blocks_triton
from spin_kernels.slot_remap import triton as slot_remap_triton
from spin_kernels.window_max import triton as window_max_triton
from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import StepInputs, commit_step, gather_scores, plan_step
from spin_server.policy.policy import ExplorationPolicy, Policy
from spin_server.policy.ratio import Ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, TOP_K, DENSE, RATIO, SEED = 16, 40, 70, 4, 3
LAYERS = (2, 5, 11)
NUMBERS = torch.tensor(LAYERS, device=DEVICE)
STATES, MAX_SLOTS = 7, 400
WIDTH = MAX_SLOTS // BLOCK
ALL = {"first_layer": 0, "num_layers": len(LAYERS)}
SIZES = {"block_size": BLOCK, "compress_ratio": RATIO}


def policy(sparsity: str, exploration: str, kind: ExplorationPolicy, period: int = 0) -> Policy:
    return Policy(
        sparsity=Ratio.parse("sparsity", sparsity),
        exploration=Ratio.parse("exploration", exploration),
        exploration_policy=kind,
        ema_decay=Ratio.parse("ema_decay", "0.7"),
        probe_period=period,
    )


POLICIES = [
    policy("0.3", "0.05", "random"),
    policy("0.65", "0.3", "block_age"),
    policy("0.5", "0.2", "staleness"),
    policy("0.4", "0.2", "none"),
    policy("0.5", "0.4", "random", period=4),
    policy("0", "0.3", "random"),
]
TABLE = PolicyRows.of(POLICIES)
COLUMNS = PolicyColumns(
    **{f.name: getattr(TABLE, f.name).to(DEVICE) for f in fields(PolicyColumns)}
)


def scores_of(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Scores with ties, zeros of both signs, and what is no observation."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator).mul(4).round().div(4)
    scores[torch.rand(shape, generator=generator) < 0.1] *= -0.0
    for value in (torch.nan, torch.inf, -torch.inf):
        scores[torch.rand(shape, generator=generator) < 0.01] = value
    return scores


class Requests:
    """Requests at random positions that decode, jump to another slot of state, and leave."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.positions = [self.draw(250, 1200) for _ in range(STATES)]

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.random))

    def step(self) -> tuple[Rows, list[int]]:
        """Rows in random order, with padding and rows of prompts; which slots start anew."""
        resets = [s for s in range(STATES) if self.draw(0, 10) == 0]
        for slot in resets:
            self.positions[slot] = self.draw(100, 1200)
        order = torch.randperm(STATES, generator=self.random).tolist()[: self.draw(2, STATES + 1)]
        slots = [-1 if self.draw(0, 8) == 0 else s for s in order]
        positions = [self.positions[s] for s in order]
        for slot, used in zip(order, slots, strict=True):
            self.positions[slot] += used >= 0
        num_slots = [(p + 1) // RATIO for p in positions]
        rows = Rows(
            slots=torch.tensor([*slots, -1]),
            policies=torch.tensor([*(s % len(POLICIES) for s in order), 0]),
            keys=torch.tensor([*((s * 2654435761 - 2**40) << 20 for s in order), 0]),
            positions=torch.tensor([*positions, 0]),
            num_slots=torch.tensor([*num_slots, 0], dtype=torch.int32),
        )
        return Rows(*(getattr(rows, f.name).to(DEVICE) for f in fields(Rows))), resets


def equal(one: object, other: object, *names: str) -> None:
    for name in names:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def plan_with(
    planner: Any, histories: Histories, rows: Rows, plan: StepPlan, layers: dict[str, int] = ALL
) -> None:
    planner(
        histories,
        rows,
        COLUMNS,
        NUMBERS,
        plan,
        num_rows=len(rows.slots),
        top_k=TOP_K,
        dense_slots=DENSE,
        seed=SEED,
        **layers,
        **SIZES,
    )


def empty(dtype: torch.dtype = torch.float32) -> tuple[Histories, StepPlan]:
    histories = Histories.zeros(
        len(LAYERS),
        num_states=STATES,
        num_slots=MAX_SLOTS,
        block_size=BLOCK,
        device=DEVICE,
        dtype=dtype,
    )
    made = {f.name: getattr(histories, f.name) for f in fields(Histories)}
    histories = Histories(
        **{name: apart(t) if isinstance(t, Tensor) else t for name, t in made.items()}
    )
    plan = StepPlan.empty(
        len(LAYERS),
        num_rows=STATES + 1,
        num_blocks=WIDTH,
        num_policies=len(POLICIES),
        device=DEVICE,
    )
    return histories, plan


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.bfloat16)])
def test_kernels_equal_their_references_step_by_step(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shares of more than a row, and tiles that a row's last block is and is not part of.
    few = history_update_triton.Shape(programs=3, warps=4, blocks=4)
    monkeypatch.setattr(history_update_triton, "BESIDE", few)
    requests = Requests(seed)
    expected, found = empty(dtype), empty(dtype)
    known: list[Tensor] = []
    watch(monkeypatch, lambda: known)
    for step in range(10):
        rows, resets = requests.step()
        known[:] = [NUMBERS]
        known += [
            getattr(arguments, f.name)
            for arguments in (*found, rows, COLUMNS)
            for f in fields(arguments)
            if isinstance(getattr(arguments, f.name), Tensor)
        ]
        num_rows = len(rows.slots)
        for (histories, plan), window, planner in (
            (expected, window_max.window_max, plan_blocks.plan_blocks),
            (found, window_max_triton.window_max, plan_blocks_triton.plan_blocks),
        ):
            histories.reset(torch.tensor(resets, dtype=torch.int64, device=DEVICE))
            window(histories, rows, num_rows=num_rows, dense_slots=DENSE, **ALL, **SIZES)
            plan_with(planner, histories, rows, plan)
        equal(expected[1], found[1], "counts", "lengths", "step_numbers", "outcomes")
        listed = torch.arange(WIDTH, device=DEVICE) < expected[1].counts[:, :, None]
        assert torch.equal(expected[1].blocks[listed], found[1].blocks[listed])
        for index in range(len(LAYERS)):
            longest = max(1, int(expected[1].lengths[index].max()))
            scores = scores_of(100 * step + index, (num_rows, longest)).to(DEVICE)
            known.append(scores)
            for (histories, plan), update in (
                (expected, history_update.history_update),
                (found, history_update_triton.history_update),
            ):
                beside = {"beside": step % 2 == 0}
                update(
                    histories,
                    rows,
                    COLUMNS,
                    plan,
                    index,
                    scores,
                    num_rows=num_rows,
                    **beside,
                    **SIZES,
                )
        equal(
            expected[0],
            found[0],
            *("vertical", "diagonal", "last_observed", "steps", "diagonal_at"),
        )
    assert expected[1].outcomes.sum(1)[:, 1:4].min() > 0
    assert (expected[1].outcomes.sum((0, 2)) > 0).all()  # of every policy


@pytest.mark.parametrize("seed", range(2))
def test_kernels_choose_what_the_definition_chooses(seed: int) -> None:
    requests = Requests(100 + seed)
    histories, plan = empty()
    options = SpinOptions(block_size=BLOCK, top_k=TOP_K, seed=SEED)
    state = SpinState.zeros(
        len(LAYERS) * STATES, num_positions=MAX_SLOTS, num_offsets=MAX_SLOTS + 1, num_blocks=WIDTH
    )
    compared = 0
    for step in range(10):
        rows, resets = requests.step()
        num_rows = len(rows.slots)
        histories.reset(torch.tensor(resets, dtype=torch.int64, device=DEVICE))
        window_max_triton.window_max(
            histories, rows, num_rows=num_rows, dense_slots=DENSE, **ALL, **SIZES
        )
        plan_with(plan_blocks_triton.plan_blocks, histories, rows, plan)
        active = (plan.step_numbers[0, :num_rows] >= 0).nonzero()[:, 0].cpu()
        num_slots, slots = rows.num_slots.cpu().long(), rows.slots.cpu()
        for index, layer in enumerate(LAYERS):
            state.reset(index * STATES + torch.tensor(resets, dtype=torch.int64))
            dense = scores_of(100 * step + index, (num_rows, MAX_SLOTS))
            compact = torch.full((num_rows, MAX_SLOTS), torch.nan)
            for row in range(num_rows):
                blocks = plan.blocks[index, row, : plan.counts[index, row]].cpu().long()
                places = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
                places = places[places < num_slots[row]]
                assert len(places) == plan.lengths[index, row]
                compact[row, : len(places)] = dense[row, places]
            if len(active):
                inputs = StepInputs(
                    state_rows=index * STATES + slots[active],
                    query_positions=(rows.positions.cpu()[active] // RATIO)[:, None],
                    num_slots=num_slots[active][:, None],
                    request_keys=rows.keys.cpu()[active],
                    layers=torch.full((len(active),), layer),
                    diagonal_positions=(rows.positions.cpu()[active] // RATIO)[:, None],
                )
                policies = PolicyRows.of([POLICIES[p] for p in rows.policies.cpu()[active]])
                wanted = plan_step(options, policies, state, inputs, width=WIDTH)
                for row, blocks in zip(active.tolist(), wanted.blocks, strict=True):
                    chosen = plan.blocks[index, row, : plan.counts[index, row]]
                    assert chosen.tolist() == blocks[blocks >= 0].tolist()
                    compared += 1
                commit_step(
                    options,
                    policies,
                    state,
                    inputs,
                    wanted,
                    gather_scores(dense[active][:, None], wanted.blocks, BLOCK),
                    torch.zeros(len(active), dtype=torch.int64),
                )
            history_update_triton.history_update(
                histories,
                rows,
                COLUMNS,
                plan,
                index,
                compact.to(DEVICE),
                num_rows=num_rows,
                **SIZES,
            )
        assert torch.equal(histories.vertical.cpu(), state.vertical)
        assert torch.equal(histories.diagonal.cpu(), state.diagonal)
        assert torch.equal(histories.last_observed.cpu().long(), state.last_observed)
    assert compared > 60


def test_layers_planned_one_by_one_are_planned_alike() -> None:
    requests = Requests(7)
    together, apart = empty(), empty()
    for step in range(4):
        rows, _ = requests.step()
        num_rows = len(rows.slots)
        each = [{"first_layer": index, "num_layers": 1} for index in range(len(LAYERS))]
        for (histories, plan), parts in ((together, [ALL]), (apart, each)):
            for part in parts:
                window_max_triton.window_max(
                    histories, rows, num_rows=num_rows, dense_slots=DENSE, **part, **SIZES
                )
                plan_with(plan_blocks_triton.plan_blocks, histories, rows, plan, part)
            for index in range(len(LAYERS)):
                scores = scores_of(100 * step + index, (num_rows, MAX_SLOTS)).to(DEVICE)
                history_update_triton.history_update(
                    histories,
                    rows,
                    COLUMNS,
                    plan,
                    index,
                    scores,
                    num_rows=num_rows,
                    beside=parts is each,
                    **SIZES,
                )
        equal(together[1], apart[1], "blocks", "counts", "lengths", "step_numbers", "outcomes")
        equal(together[0], apart[0], "vertical", "diagonal", "diagonal_max", "steps")


def test_rows_without_a_history_touch_none() -> None:
    histories, plan = empty()
    for tensor in (histories.vertical, histories.diagonal, histories.vertical_max):
        tensor.fill_(7.0)
    histories.steps.fill_(3)
    before = [getattr(histories, f.name) for f in fields(Histories)]
    copies = [t.clone() if isinstance(t, Tensor) else t for t in before]
    rows = Rows(
        slots=torch.tensor([-1, -1, 2], device=DEVICE),
        policies=torch.zeros(3, dtype=torch.int64, device=DEVICE),
        keys=torch.zeros(3, dtype=torch.int64, device=DEVICE),
        positions=torch.tensor([799, 0, 103], device=DEVICE),
        # A prompt's row, padding, and a context that is scored densely.
        num_slots=torch.tensor([200, 0, 70], dtype=torch.int32, device=DEVICE),
    )
    plan_with(plan_blocks_triton.plan_blocks, histories, rows, plan)
    scores = torch.randn(3, 200, device=DEVICE)
    history_update_triton.history_update(
        histories, rows, COLUMNS, plan, 1, scores, num_rows=3, **SIZES
    )
    for tensor, copy in zip(before, copies, strict=True):
        assert torch.equal(tensor, copy) if isinstance(tensor, Tensor) else tensor == copy
    assert plan.lengths[1, :3].tolist() == [200, 0, 70]
    assert plan.counts[1, :3].tolist() == [13, 0, 5]
    assert plan.blocks[1, 0, :13].tolist() == list(range(13))


def test_indices_come_back_as_slots_and_none_stays_none() -> None:
    blocks = torch.tensor([[0, 3, 7, 99], [1, 2, 5, 6]], dtype=torch.int32, device=DEVICE)
    indices = torch.full((2, 8), -1, dtype=torch.int32, device=DEVICE)
    indices[:, :5] = torch.tensor([[0, 15, 16, 47, -1], [63, 0, -1, 31, 32]])
    expected = torch.tensor([[0, 15, 48, 127, -1, -1], [111, 16, -1, 47, 80, -1]])
    for remap in (slot_remap.slot_remap, slot_remap_triton.slot_remap):
        buffer = indices.clone()
        remap(buffer[:, :6], blocks, block_size=BLOCK)
        assert buffer[:, :6].tolist() == expected.tolist()
        assert buffer[:, 6:].tolist() == [[-1, -1]] * 2


def test_compact_tables_list_the_pages_of_the_blocks() -> None:
    _, plan = empty()
    plan.blocks[1, :2, :3] = torch.tensor([[0, 2, 3], [1, 4, 0]])
    plan.counts[1, :2] = torch.tensor([3, 2])
    plan.blocks[2, :2, :2] = torch.tensor([[4, 0], [0, 3]])
    plan.counts[2, :2] = torch.tensor([1, 2])
    pages = torch.arange(20, dtype=torch.int32, device=DEVICE).view(2, 10) * 7 + 1
    for fill in (compact_table.compact_table, compact_table_triton.compact_table):
        tables = torch.full((3, STATES + 1, WIDTH), -5, dtype=torch.int32, device=DEVICE)
        fill(pages[:, :5], plan, tables, first_layer=1, num_layers=2, num_rows=2)
        assert tables[1, 0, :4].tolist() == [1, 15, 22, -5]
        assert tables[1, 1, :3].tolist() == [78, 99, -5]
        assert tables[2, 0, :2].tolist() == [29, -5]
        assert tables[2, 1, :3].tolist() == [71, 92, -5]
        assert (tables[0] == -5).all()
        assert (tables[:, 2:] == -5).all()
