"""Budgets against values worked out by hand."""

import math
from fractions import Fraction

import pytest
import torch

from spin_kernels.block_budget import BILLION, block_budget, keep_count, num_explored
from spin_server.policy import ratio
from spin_server.policy.ratio import Ratio


def test_shares_have_one_unit() -> None:
    # The two rooms may not import each other.
    assert BILLION == ratio.BILLION


def keep(sparsity: str, total: int) -> int:
    billionths = Ratio.parse("sparsity", sparsity).billionths
    return int(keep_count(torch.tensor([total]), torch.tensor([billionths])))


@pytest.mark.parametrize(
    ("sparsity", "total", "expected"),
    [
        ("0.7", 10, 3),  # float64: ceil(0.30000000000000004 * 10) = 4
        ("0.4", 10, 6),
        ("0.4", 500, 300),  # float32 is off by one here
        ("0.3", 2028, 1420),  # 1419.6
        ("0", 2028, 2028),
        ("1", 2028, 0),
        ("0.999999999", 2028, 1),
        ("0.65", 0, 0),
    ],
)
def test_kept_share_is_rounded_up_exactly(sparsity: str, total: int, expected: int) -> None:
    assert keep(sparsity, total) == expected


def test_kept_share_equals_fractions_for_every_percentage() -> None:
    for percent in range(101):
        for total in range(0, 2100, 7):
            expected = math.ceil((1 - Fraction(percent, 100)) * total)
            assert keep(f"{percent / 100}", total) == expected, (percent, total)


@pytest.mark.parametrize(
    ("blocks", "wanted", "expected"),
    [
        (100, 30, 30),
        (100, 3, 8),  # the indexer needs 512 slots: 8 blocks of 64
        (5, 3, 5),  # fewer blocks than that: all of them
        (1, 0, 1),
        (0, 0, 0),
        (100, 1000, 100),
    ],
)
def test_budget_is_bounded_by_top_k_and_context(blocks: int, wanted: int, expected: int) -> None:
    budget = block_budget(torch.tensor([blocks]), torch.tensor([wanted]), top_k=512, block_size=64)
    assert budget.tolist() == [expected]


def test_forced_blocks_win_over_a_smaller_budget() -> None:
    budget = block_budget(torch.tensor([9, 1]), torch.tensor([0, 0]), top_k=1, block_size=64)
    assert budget.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("budget", "blocks", "share", "expected"),
    [
        (60, 100, "0", 0),
        (60, 100, "0.05", 3),
        (60, 100, "0.01", 1),  # at least one
        (10, 100, "0.29", 2),  # 2.9, rounded down
        (10, 100, "0.3", 3),  # float64: 0.3 * 10 is below 3 in some orders
        (60, 100, "1", 58),  # the two forced blocks stay
        (2, 100, "1", 0),
        (1, 1, "1", 0),
    ],
)
def test_explored_share_is_rounded_down_and_leaves_the_forced_blocks(
    budget: int, blocks: int, share: str, expected: int
) -> None:
    explored = num_explored(
        torch.tensor([budget]),
        torch.tensor([blocks]),
        torch.tensor([Ratio.parse("share", share).billionths]),
    )
    assert explored.tolist() == [expected]
