"""SPIN for one layer: plan the blocks of a step's decode rows, then learn from their scores.

Knows nothing of vLLM: it takes lengths and positions and gives block lists.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_kernels.block_list import block_list
from spin_kernels.block_select import EXPLOIT, EXPLORE, FORCED, INVISIBLE, SKIPPED
from spin_server.algorithm.budget import ceil_div
from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import StepInputs, StepPlan, commit_step, plan_step
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import NO_SLOT, StepRows

# Outcomes of a block, in the order of the counters.
OUTCOMES = ("exploit", "explore", "forced", "skipped", "dense")
# Why a row was scored densely without being a step of SPIN's.
FALLBACKS = ("prompt", "short_context")
_CODES = (EXPLOIT, EXPLORE, FORCED, SKIPPED)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer's decode rows score.

    Args:
        blocks: (int32): [rows, width]; ascending, padded with -1. Every row is listed, those
            without a history with all their blocks.
        counts: (int32): [rows]; listed blocks.
        active: (int64): [steps]; the rows that are steps of SPIN's.
        step, inputs: of the active rows; None where there are none.
    """

    blocks: Tensor
    counts: Tensor
    active: Tensor
    step: StepPlan | None
    inputs: StepInputs | None


class SpinLayer:
    """The histories of one layer, and what became of its blocks.

    Args:
        layer: its number in the model; part of the random draw's key.
        options: SPIN's choices.
        table: the policies.
        num_states: requests that may be live at once.
        max_slots: slots of the longest context.
        compress_ratio: tokens per slot.
    """

    def __init__(
        self,
        layer: int,
        options: SpinOptions,
        table: PolicyTable,
        *,
        num_states: int,
        max_slots: int,
        compress_ratio: int,
    ) -> None:
        self.layer = layer
        self.options = options
        self.table = table
        self.compress_ratio = compress_ratio
        num_blocks = -(-max_slots // options.block_size)
        # One slot more for D: a query may lie one slot past the last visible one.
        self.state = SpinState.zeros(
            num_states,
            num_positions=num_blocks * options.block_size,
            num_offsets=max_slots + 1,
            num_blocks=num_blocks,
        )
        self.outcomes = torch.zeros(len(OUTCOMES), dtype=torch.int64)
        self.fallbacks = torch.zeros(len(FALLBACKS), dtype=torch.int64)

    def plan(self, rows: StepRows, num_slots: Tensor) -> LayerPlan:
        """Choose the blocks that each decode row scores.

        Args:
            rows: the decode rows of the step.
            num_slots: (int64): [rows]; slots visible to each.
        """
        self.state.reset(rows.resets)
        num_blocks = ceil_div(num_slots, self.options.block_size)
        width = int(num_blocks.max()) if len(num_blocks) else 0
        mask = torch.arange(width) < num_blocks[:, None]

        decodes = rows.slots != NO_SLOT
        # Up to K slots the indexer keeps everything, and vLLM may not even call it.
        long_enough = num_slots > self.options.top_k
        active = (decodes & long_enough).nonzero()[:, 0]
        self.fallbacks += torch.stack([(~decodes).sum(), (decodes & ~long_enough).sum()])
        step = inputs = None
        if len(active):
            inputs = self._inputs(rows, num_slots, active)
            policies = self.table.rows(rows.policies[active])
            step = plan_step(self.options, policies, self.state, inputs, width=width)
            mask[active] = step.shared
            self._count(step)
        blocks, counts = block_list(mask)
        kept = int(counts.max()) if len(counts) else 0
        return LayerPlan(blocks[:, :kept], counts, active, step, inputs)

    def _inputs(self, rows: StepRows, num_slots: Tensor, active: Tensor) -> StepInputs:
        positions = (rows.positions[active] // self.compress_ratio)[:, None]
        return StepInputs(
            state_rows=rows.slots[active],
            query_positions=positions,
            num_slots=num_slots[active][:, None],
            request_keys=rows.keys[active],
            layers=torch.full((len(active),), self.layer),
            diagonal_positions=positions,
        )

    def _count(self, step: StepPlan) -> None:
        sparse = step.outcomes[~step.dense, 0]
        counts = [(sparse == code).sum() for code in _CODES]
        dense = (step.outcomes[step.dense, 0] != INVISIBLE).sum()
        self.outcomes += torch.stack([*counts, dense])

    def learn(self, plan: LayerPlan, rows: StepRows, scores: Tensor) -> None:
        """Fold the scores of the active rows into their histories.

        Args:
            plan: of this step.
            rows: the decode rows of the step.
            scores: (float32): [rows, at most width * block_size]; column c of a row is
                slot blocks[row, c // block_size] * block_size + c % block_size.
        """
        if plan.step is None or plan.inputs is None:
            return
        # The listed blocks alone, of a plan as wide as the longest context.
        step = dataclasses.replace(plan.step, blocks=plan.step.blocks[:, : plan.blocks.shape[1]])
        compact = scores.new_full(
            (len(plan.active), 1, plan.blocks.shape[1] * self.options.block_size), torch.nan
        )
        compact[:, 0, : scores.shape[1]] = scores[plan.active]
        commit_step(
            self.options,
            self.table.rows(rows.policies[plan.active]),
            self.state,
            plan.inputs,
            step,
            compact,
            torch.zeros(len(plan.active), dtype=torch.int64),
        )
