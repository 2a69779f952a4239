"""A batch is as many lone requests: policies and histories do not mix."""

import torch

from spin_server.algorithm.options import SpinOptions
from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.algorithm.state import SpinState
from spin_server.algorithm.step import StepInputs, commit_step, gather_scores, plan_step
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

OPTIONS = SpinOptions(block_size=4, top_k=8)
SLOTS = 80
POLICIES = [
    Policy(sparsity=Ratio.parse("s", s), exploration=Ratio.parse("e", e), exploration_policy=p)
    for s, e, p in (
        ("0.3", "0.05", "random"),
        ("0.65", "0.2", "block_age"),
        ("0", "0.5", "staleness"),
        ("0.5", "0.3", "none"),
    )
]


def run(requests: list[int], states: list[int]) -> list[list[list[int]]]:
    """Decode some of four requests together; each one's scored blocks, step by step."""
    state = SpinState.zeros(8, num_positions=SLOTS, num_offsets=SLOTS + 1, num_blocks=SLOTS // 4)
    policies = PolicyRows.of([POLICIES[r] for r in requests])
    scored: list[list[list[int]]] = [[] for _ in requests]
    for step in range(10):
        slots = torch.tensor([[40 + 7 * r + step] for r in requests])
        inputs = StepInputs(
            state_rows=torch.tensor(states),
            query_positions=slots,
            num_slots=slots,
            request_keys=torch.tensor([100 + r for r in requests]),
            layers=torch.zeros(len(requests), dtype=torch.int64),
            diagonal_positions=slots,
        )
        plan = plan_step(OPTIONS, policies, state, inputs, width=SLOTS // 4)
        scores = torch.stack(
            [
                torch.randn(1, SLOTS, generator=torch.Generator().manual_seed(1000 * r + step))
                for r in requests
            ]
        )
        compact = gather_scores(scores, plan.blocks, OPTIONS.block_size)
        accepted = torch.zeros(len(requests), dtype=torch.int64)
        commit_step(OPTIONS, policies, state, inputs, plan, compact, accepted)
        for i, mask in enumerate(plan.shared):
            scored[i].append(mask.nonzero()[:, 0].tolist())
    return scored


def test_batched_requests_choose_as_they_do_alone() -> None:
    together = run([0, 1, 2, 3], states=[6, 0, 3, 5])
    for request in range(4):
        assert together[request] == run([request], states=[2])[0]
    assert len(together[0][0]) == 10  # dense after a reset: 40 slots in blocks of 4
    assert all(len(blocks) < 13 for blocks in together[1][1:])


def test_batch_order_does_not_matter() -> None:
    forward, backward = run([0, 1, 2, 3], [0, 1, 2, 3]), run([3, 2, 1, 0], [0, 1, 2, 3])
    assert forward == backward[::-1]


def test_draft_rows_of_several_requests_choose_as_they_do_alone() -> None:
    def choose(requests: list[int]) -> list[list[list[int]]]:
        count = len(requests)
        state = SpinState.zeros(count, num_positions=SLOTS, num_offsets=99, num_blocks=SLOTS // 4)
        state.steps.fill_(1)  # not dense
        for row, request in enumerate(requests):
            generator = torch.Generator().manual_seed(request)
            state.vertical[row] = torch.randn(SLOTS, generator=generator)
        slots = torch.tensor([[60 + 3 * r, 61 + 3 * r, 64 + 3 * r] for r in requests])
        inputs = StepInputs(
            state_rows=torch.arange(count),
            query_positions=slots,
            num_slots=slots,
            request_keys=torch.tensor([100 + r for r in requests]),
            layers=torch.zeros(count, dtype=torch.int64),
            diagonal_positions=slots,
        )
        policies = PolicyRows.of([POLICIES[r] for r in requests])
        plan = plan_step(OPTIONS, policies, state, inputs, width=SLOTS // 4)
        return [[row.nonzero()[:, 0].tolist() for row in rows > 0] for rows in plan.outcomes]

    together = choose([0, 1, 3])
    assert together == [choose([0])[0], choose([1])[0], choose([3])[0]]
    assert together[0][0] != together[0][2]


def test_reset_makes_the_next_step_dense_and_forgets_everything() -> None:
    state = SpinState.zeros(2, num_positions=4, num_offsets=4, num_blocks=1)
    for tensor in (state.vertical, state.diagonal, state.last_observed, state.steps):
        tensor.fill_(7)
    state.reset(torch.tensor([1]))
    assert state.vertical[1].tolist() == state.diagonal[1].tolist() == [0.0] * 4
    assert state.last_observed[1].tolist() == [-1]
    assert state.steps.tolist() == [7, 0]
    assert state.vertical[0].tolist() == [7.0] * 4
