"""What the union of a step's rows leaves of the sparsity, with one random draw and with one each.

  python benchmarks/union_of_drafts.py
Random histories of 2,000 blocks at a target of 40%; mean over the places where a step may begin.
"""

import torch

from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import StepInputs, plan_step
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

BLOCKS = 2000
SLOTS = BLOCKS * 64


def realized(exploration: str, ratio: int, rows: int, *, one_draw: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    state = SpinState.zeros(1, num_positions=SLOTS, num_offsets=SLOTS + 1, num_blocks=BLOCKS)
    state.vertical[0] = torch.randn(SLOTS, generator=generator) ** 3
    state.diagonal[0] = torch.randn(SLOTS + 1, generator=generator) ** 3 / 2
    state.steps.fill_(5)
    policy = Policy(
        sparsity=Ratio.parse("sparsity", "0.4"),
        exploration=Ratio.parse("exploration", exploration),
    )
    policies, found = PolicyRows.of([policy]), []
    for start in range(4):
        positions = (SLOTS - 8) * ratio + start + torch.arange(rows)
        parts = [positions] if one_draw else list(positions[:, None])
        kept = torch.zeros(BLOCKS, dtype=torch.bool)
        for part in parts:
            queries = (part // ratio)[None]
            inputs = StepInputs(
                state_rows=torch.tensor([0]),
                query_positions=queries,
                num_slots=((part + 1) // ratio)[None],
                request_keys=torch.tensor([77]),
                layers=torch.tensor([2]),
                diagonal_positions=queries,
            )
            plan = plan_step(SpinOptions(), policies, state, inputs, width=BLOCKS)
            kept |= plan.shared[0]
        found.append(1 - int(kept.sum()) / int(plan.num_blocks.max()))
    return sum(found) / len(found)


def main() -> None:
    print("| tokens a slot | rows | exploration | a draw each | one draw |")
    for ratio in (4, 1):
        for rows in (2, 4, 6):
            for exploration in ("0", "0.05", "0.2"):
                each, one = (realized(exploration, ratio, rows, one_draw=o) for o in (False, True))
                print(f"| {ratio} | {rows} | {float(exploration):.0%} | {each:.1%} | {one:.1%} |")


if __name__ == "__main__":
    main()
