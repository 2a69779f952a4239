"""The device kernels at DeepSeek-V3.2's sizes: one slot per token, K = 2048, pages of 64 slots.

As in test_device_kernels.py, without a GPU they run in Triton's interpreter.
"""

from dataclasses import fields

import torch
from torch import Tensor

from spin_kernels import history_update, plan_blocks, slot_remap, window_max
from spin_kernels.arguments import Histories, PolicyColumns, Rows, StepPlan
from spin_kernels.history_update import triton as history_update_triton
from spin_kernels.plan_blocks import triton as plan_blocks_triton
from spin_kernels.slot_remap import triton as slot_remap_triton
from spin_kernels.window_max import triton as window_max_triton
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, TOP_K, SLOTS, STATES = 64, 2048, 6144, 3
SIZES = {"block_size": BLOCK, "compress_ratio": 1}
LAYER = {"first_layer": 0, "num_layers": 1}
POLICIES = PolicyRows.of(
    [
        Policy(sparsity=Ratio.parse("s", "0.4"), exploration=Ratio.parse("e", "0.2")),
        Policy(sparsity=Ratio.parse("s", "0.95"), exploration_policy="block_age"),
        Policy(sparsity=Ratio.parse("s", "0.5"), exploration_policy="staleness"),
    ]
)
COLUMNS = PolicyColumns(
    **{f.name: getattr(POLICIES, f.name).to(DEVICE) for f in fields(PolicyColumns)}
)


def rows_at(step: int) -> Rows:
    """A request of each policy, and a row of padding."""
    positions = [5000 + step, 6100 + step, 2500 + 700 * step]  # the last one jumps
    return Rows(
        slots=torch.tensor([2, 0, 1, -1], device=DEVICE),
        policies=torch.tensor([0, 1, 2, 0], device=DEVICE),
        keys=torch.tensor([11, -5, 2**60, 0], device=DEVICE),
        positions=torch.tensor([*positions, 0], device=DEVICE),
        num_slots=torch.tensor([*(p + 1 for p in positions), 0], dtype=torch.int32, device=DEVICE),
    )


def test_kernels_equal_their_references_with_a_slot_for_every_token() -> None:
    generator = torch.Generator().manual_seed(0)
    made = []
    for window, planner, update, remap in (
        (
            window_max.window_max,
            plan_blocks.plan_blocks,
            history_update.history_update,
            slot_remap.slot_remap,
        ),
        (
            window_max_triton.window_max,
            plan_blocks_triton.plan_blocks,
            history_update_triton.history_update,
            slot_remap_triton.slot_remap,
        ),
    ):
        histories = Histories.zeros(
            1, num_states=STATES, num_slots=SLOTS, block_size=BLOCK, device=DEVICE
        )
        plan = StepPlan.empty(
            1,
            num_rows=STATES + 1,
            num_blocks=SLOTS // BLOCK,
            num_policies=len(POLICIES.sparsity),
            device=DEVICE,
        )
        made.append((histories, plan, window, planner, update, remap))
    for step in range(4):
        rows = rows_at(step)
        scores = torch.randn(STATES + 1, SLOTS, generator=generator).to(DEVICE)
        picks = torch.rand(STATES + 1, SLOTS, generator=generator).to(DEVICE)
        chosen: list[Tensor] = []
        for histories, plan, window, planner, update, remap in made:
            window(histories, rows, num_rows=STATES + 1, dense_slots=TOP_K, **LAYER, **SIZES)
            planner(
                histories,
                rows,
                COLUMNS,
                torch.tensor([7], device=DEVICE),
                plan,
                num_rows=STATES + 1,
                top_k=TOP_K,
                dense_slots=TOP_K,
                seed=3,
                **LAYER,
                **SIZES,
            )
            update(histories, rows, COLUMNS, plan, 0, scores, num_rows=STATES + 1, **SIZES)
            # K compact slots of each row, none of the row of padding.
            past = torch.arange(SLOTS, device=DEVICE) >= plan.lengths[0, :, None]
            indices = picks.masked_fill(past, -1).topk(TOP_K).indices.int()
            indices[past.gather(1, indices.long())] = -1
            remap(indices, plan.blocks[0], block_size=BLOCK)
            chosen.append(indices)
        (one, first, *_), (other, second, *_) = made
        for name in ("counts", "lengths", "step_numbers", "outcomes"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
        for name in ("vertical", "diagonal", "last_observed", "steps"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(*chosen)
        # The smallest budget holds K slots, but for those that its newest block has not yet.
        found = (chosen[0] >= 0).sum(1)
        assert found.tolist() == first.lengths[0].clamp(max=TOP_K).tolist()
    # ceil(0.6 * 79) of the first request's blocks; K / 64 of the second's, though 5% were asked.
    assert first.counts[0].tolist() == [48, 32, 36, 0]
