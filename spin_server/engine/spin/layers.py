"""SPIN for the CSA layers of one worker: plan the blocks of a step, then learn from their scores.

A history is read at the first layer of a step and not before, and written after the last one, so
that one launch of each operation serves all layers. Knows nothing of vLLM: it takes lengths and
positions and gives block lists.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spin_kernels.block_budget import ceil_div
from spin_kernels.block_select import EXPLOIT, EXPLORE, FORCED, SKIPPED
from spin_server.algorithm.options import HistoryType, SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import StepInputs, StepPlan, commit_step, plan_step
from spin_server.engine.spin.digests import checksums, layer_checksums
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import NO_SLOT, StepRows

# Outcomes of a block, in the order of the counters.
OUTCOMES = ("exploit", "explore", "forced", "skipped", "dense")
# Why a row was scored densely without being a step of SPIN's.
FALLBACKS = ("prompt", "short_context", "no_place", "uneven_drafts")
_CODES = (EXPLOIT, EXPLORE, FORCED, SKIPPED)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer's decode rows score.

    Args:
        blocks: (int32): [rows, width]; ascending, padded with -1. Every row is listed, those
            without a history with all their blocks.
        lengths: (int64): [rows]; visible slots of the listed blocks.
        active: (int64): [steps]; the rows that are steps of SPIN's.
        fresh: (bool): [steps]; whether the row's history starts with this step.
    """

    blocks: Tensor
    lengths: Tensor
    active: Tensor
    fresh: Tensor


@dataclass(slots=True)
class StepState:
    """A step between its first layer and its last.

    Args:
        rows: its decode rows.
        active, fresh: [steps]; see `LayerPlan`.
        blocks: (int32): [layers, rows, width].
        lengths: (int64): [layers, rows].
        policies, inputs, plan: of the active rows of every layer, layer by layer; None where no
            row is active.
        scores: what each layer's active rows scored, once it ran.
    """

    rows: StepRows
    active: Tensor
    fresh: Tensor
    blocks: Tensor
    lengths: Tensor
    policies: PolicyRows | None = None
    inputs: StepInputs | None = None
    plan: StepPlan | None = None
    scores: dict[int, Tensor] = field(default_factory=dict)


def count_fallbacks(rows: StepRows, *, dense_slots: int, compress_ratio: int) -> Tensor:
    """Count a step's single-token rows that are none of SPIN's: (int64), as FALLBACKS.

    Args:
        rows: of the step.
        dense_slots: contexts of no more slots are scored densely.
        compress_ratio: tokens per slot.
    """
    prompts = ~rows.decodes & (rows.num_tokens == 1)
    short = rows.decodes & ((rows.positions + 1) // compress_ratio <= dense_slots)
    placeless = rows.decodes & ~short & (rows.slots == NO_SLOT)
    # Which rows vLLM scores as prompts only the device's layers hear of, later.
    return torch.stack([prompts.sum(), short.sum(), placeless.sum(), torch.tensor(0)])


def make_histories(
    num_layers: int,
    *,
    num_states: int,
    max_slots: int,
    block_size: int,
    history: HistoryType = "float32",
    device: str = "cpu",
) -> SpinState:
    """Make a worker's histories; a request's lie num_states apart, one for each layer.

    Args:
        num_layers: CSA layers.
        num_states: requests that may hold a history at once.
        max_slots: slots of the longest context.
        block_size: slots per block.
        history, device: see `SpinState.zeros`.
    """
    num_blocks = -(-max_slots // block_size)
    return SpinState.zeros(
        num_layers * num_states,
        num_positions=num_blocks * block_size,
        # One more for D: a query may lie one slot past the last visible one.
        num_offsets=max_slots + 1,
        num_blocks=num_blocks,
        history=history,
        device=device,
    )


def history_bytes(
    num_layers: int, *, num_states: int, max_slots: int, history: HistoryType = "float32"
) -> int:
    """Say what a worker's histories take, without making them; see `make_histories`."""
    return make_histories(
        num_layers,
        num_states=num_states,
        max_slots=max_slots,
        block_size=SpinOptions().block_size,
        history=history,
        device="meta",
    ).num_bytes


class SpinLayers:
    """The histories of all layers, and what became of their blocks; a CPU's have no drafts.

    Args:
        layers: their numbers in the model, part of the random draw's key, in running order.
        options: SPIN's choices.
        table: the policies.
        num_states: requests that may be live at once.
        max_slots: slots of the longest context.
        compress_ratio: tokens per slot.
        dense_slots: contexts of no more slots are scored densely; K or more.
    """

    num_drafts = 0

    def __init__(
        self,
        layers: Sequence[int],
        options: SpinOptions,
        table: PolicyTable,
        *,
        num_states: int,
        max_slots: int,
        compress_ratio: int,
        dense_slots: int,
    ) -> None:
        self.numbers, self.num_states = tuple(layers), num_states
        self.options = options
        self.table = table
        self.compress_ratio, self.dense_slots = compress_ratio, dense_slots
        self.state = make_histories(
            len(layers),
            num_states=num_states,
            max_slots=max_slots,
            block_size=options.block_size,
            history=options.history,
        )
        self._first_states = torch.arange(len(layers)) * num_states
        self._layers = torch.tensor(self.numbers)
        self._outcomes = torch.zeros(len(layers), table.capacity, len(OUTCOMES), dtype=torch.int64)
        self.fallbacks = torch.zeros(len(FALLBACKS), dtype=torch.int64)
        self._step: StepState | None = None
        self._chosen: Tensor | None = None  # blocks of the last step; see `StepState`

    @property
    def num_bytes(self) -> int:
        """Bytes of the histories."""
        return self.state.num_bytes

    @property
    def outcomes(self) -> Tensor:
        """Blocks by outcome, (int64): [layers, outcomes]."""
        return self._outcomes.sum(1)

    @property
    def policy_outcomes(self) -> Tensor:
        """Blocks by outcome, (int64): [policies, outcomes]."""
        return self._outcomes.sum(0)

    def begin(self, rows: StepRows) -> None:
        """Note a new step: histories start anew, whether or not its layers score anything.

        Args:
            rows: of the step, in batch order.
        """
        self._step = self._chosen = None
        if len(rows.resets):
            self.state.reset(self._states(rows.resets))
        self.fallbacks += count_fallbacks(
            rows, dense_slots=self.dense_slots, compress_ratio=self.compress_ratio
        ) * len(self.numbers)

    def plan(self, layer: int, rows: StepRows, num_slots: Tensor) -> LayerPlan:
        """Choose the blocks that a layer's decode rows score.

        Args:
            layer: its number in the model.
            rows: of the step, its decode rows first; the same for every layer.
            num_slots: (int64): [rows]; slots visible to each; the same for every layer.
        """
        if self._step is None:
            self._step = self._plan(rows.first(len(num_slots)), num_slots)
            self._chosen = self._step.blocks
        index = self.numbers.index(layer)
        step = self._step
        return LayerPlan(step.blocks[index], step.lengths[index], step.active, step.fresh)

    def _states(self, slots: Tensor) -> Tensor:
        """Histories of the slots in every layer, layer by layer: [layers * slots]."""
        return (self._first_states[:, None] + slots).flatten()

    def _plan(self, rows: StepRows, num_slots: Tensor) -> StepState:
        num_layers, block_size = len(self.numbers), self.options.block_size
        num_blocks = ceil_div(num_slots, block_size)
        # At least one: a step may consist of rows that see no slot yet.
        width = max(1, int(num_blocks.max()))
        index = torch.arange(width, dtype=torch.int32)
        every = index.where(index < num_blocks[:, None], -1)

        decodes = rows.slots != NO_SLOT
        active = (decodes & (num_slots > self.dense_slots)).nonzero()[:, 0]
        fresh = self.state.steps[rows.slots[active]] == 0
        if not len(active):
            lengths = num_slots.expand(num_layers, -1)
            return StepState(rows, active, fresh, every.expand(num_layers, -1, -1), lengths)

        policies = self.table.rows(rows.policies[active].repeat(num_layers))
        positions = (rows.positions[active] // self.compress_ratio).repeat(num_layers)[:, None]
        inputs = StepInputs(
            state_rows=self._states(rows.slots[active]),
            query_positions=positions,
            num_slots=num_slots[active].repeat(num_layers)[:, None],
            request_keys=rows.keys[active].repeat(num_layers),
            layers=self._layers.repeat_interleave(len(active)),
            diagonal_positions=positions,
        )
        plan = plan_step(self.options, policies, self.state, inputs, width=width)
        self._count(plan, rows.policies[active])
        listed = plan.blocks.view(num_layers, len(active), width)
        if len(active) == len(num_slots):
            blocks = listed
        else:
            blocks = every.repeat(num_layers, 1, 1)
            blocks[:, active] = listed
        counts = (blocks >= 0).sum(-1)
        newest = num_slots - (num_blocks - 1) * block_size  # visible slots of the newest block
        lengths = torch.where(num_slots > 0, (counts - 1) * block_size + newest, 0)
        return StepState(
            rows,
            active,
            fresh,
            blocks[:, :, : max(1, int(counts.max()))],
            lengths,
            policies,
            inputs,
            plan,
        )

    def _count(self, plan: StepPlan, policies: Tensor) -> None:
        """Add up the outcomes of every layer's blocks, by the rows' policies."""
        visible = plan.num_blocks.view(len(self.numbers), -1)
        dense = plan.dense.view(len(self.numbers), -1)
        outcomes = plan.outcomes.view(len(self.numbers), -1, plan.outcomes.shape[-1])
        sparse = outcomes.masked_fill(dense[:, :, None], -1)
        counts = [(sparse == code).sum(2) for code in _CODES]
        self._outcomes.index_add_(1, policies, torch.stack([*counts, visible * dense], dim=2))

    def learn(self, layer: int, scores: Tensor) -> None:
        """Take a layer's scores; after the last layer, fold all into the histories.

        Args:
            layer: its number in the model.
            scores: (float32): [rows, at most width * block_size]; column c of a row is
                slot blocks[row, c // block_size] * block_size + c % block_size.
        """
        step = self._step
        if step is None or step.plan is None or step.policies is None or step.inputs is None:
            return
        step.scores[layer] = scores[step.active]
        if layer != self.numbers[-1]:
            return
        # The listed blocks alone, of a plan as wide as the longest context.
        plan = dataclasses.replace(step.plan, blocks=step.plan.blocks[:, : step.blocks.shape[-1]])
        compact = scores.new_full(
            (len(plan.blocks), 1, plan.blocks.shape[-1] * self.options.block_size), torch.nan
        )
        found = torch.cat([step.scores[number] for number in self.numbers])
        compact[:, 0, : found.shape[1]] = found
        commit_step(
            self.options,
            step.policies,
            self.state,
            step.inputs,
            plan,
            compact,
            torch.zeros(len(compact), dtype=torch.int64),
        )
        self._step = None

    def digest(self, *, histories: bool = True) -> dict[str, list[int]]:
        """Hash what the last step chose in each layer, and what the layer's histories hold.

        Args:
            histories: whether to hash these too.

        Returns:
            `choices`, 0 each if the step planned nothing, and `histories`; layer by layer.
        """
        num_layers, state, chosen = len(self.numbers), self.state, self._chosen
        found = {"choices": [0] * num_layers if chosen is None else checksums(chosen)}
        if histories:
            tensors = (state.vertical, state.diagonal, state.last_observed, state.steps)
            found["histories"] = layer_checksums(num_layers, *tensors)
        return found
