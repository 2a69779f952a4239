"""Corners of the op references that a whole replay reaches seldom."""

import pytest
import torch

from spin_kernels.block_list import block_list, block_slots
from spin_kernels.block_pool import block_pool
from spin_kernels.block_predict import slot_predict
from spin_kernels.block_select import block_rank, block_select, stable_rank
from spin_kernels.counter_draw import counter_draw, seed_key
from spin_kernels.ema_update import ema_update

NAN, INF = torch.nan, torch.inf


def test_pooling_divides_by_what_is_present() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 60.0], [7.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    present = torch.tensor([[True] * 5 + [False], [True] + [False] * 5])
    assert block_pool(values, present, "max").tolist() == [5.0, 7.0]
    assert block_pool(values, present, "top4").tolist() == [3.5, 7.0]
    assert block_pool(values, present, "mean").tolist() == [3.0, 7.0]
    for pooling in ("max", "top4", "mean"):
        assert block_pool(values, present & False, pooling).tolist() == [-INF, -INF]
    with pytest.raises(ValueError, match="pooling: expected one of max, top4, mean, got 'sum'"):
        block_pool(values, present, "sum")


def test_offsets_outside_the_diagonal_neither_wrap_nor_clamp() -> None:
    vertical, diagonal = torch.full((1, 4), -9.0), torch.tensor([[1.0, 2.0, 3.0]])
    rows = torch.tensor([0])

    def predict(q: int) -> list[float]:
        return slot_predict(vertical, diagonal, rows, torch.tensor([q]), num_slots=4)[0].tolist()

    assert predict(2) == [3.0, 2.0, 1.0, 0.0]  # slot 3 lies ahead of the query
    assert predict(9) == [0.0, 0.0, 0.0, 0.0]  # farther than anything stored
    assert predict(-1) == [0.0, 0.0, 0.0, 0.0]


def test_equal_scores_go_to_the_lower_block_whatever_the_sign_of_zero() -> None:
    scores = torch.tensor([[-5.0, -0.0, 0.0, -0.0, 0.0, -7.0]])
    blocks = torch.tensor([6])
    outcomes = block_select(
        block_rank(scores, blocks),
        blocks,
        torch.tensor([4]),
        torch.tensor([0]),
        torch.zeros(1, 6, dtype=torch.int64),
    )
    assert outcomes.tolist() == [[3, 1, 1, 0, 0, 3]]
    assert stable_rank(torch.tensor([[0.0, -0.0, 1.0]])).tolist() == [[0, 1, 2]]


def test_exploration_takes_the_smallest_keys_outside_the_top() -> None:
    scores = torch.tensor([[0.0, 9.0, 8.0, 7.0, 6.0, 5.0, -INF]])
    keys = torch.tensor([[0, 1, 2, 9, 4, 4, 0]])
    blocks = torch.tensor([6])
    rank = block_rank(scores, blocks)
    outcomes = block_select(rank, blocks, torch.tensor([4]), torch.tensor([1]), keys)
    # Forced 0 and 5, best 1; of 2, 3 and 4 the smallest key is 2's; 6 is not visible.
    assert outcomes.tolist() == [[3, 1, 2, 0, 0, 3, -1]]


def test_block_list_ascends_and_is_padded() -> None:
    blocks, counts = block_list(torch.tensor([[True, False, True], [False, False, False]]))
    assert blocks.tolist() == [[0, 2, -1], [-1, -1, -1]]
    assert counts.tolist() == [2, 0]
    slots, visible = block_slots(blocks, torch.tensor([5, 0]), block_size=2)
    assert slots.tolist() == [[0, 1, 4, 0, 0, 0], [0] * 6]
    assert visible.tolist() == [[True, True, True, False, False, False], [False] * 6]


def test_seed_key_is_splitmix64() -> None:
    assert seed_key(0) % 2**64 == 0xE220A8397B1DCDAF
    assert seed_key(2**64) == seed_key(0)
    assert -(2**63) <= seed_key(12345) < 2**63


def test_draw_is_philox() -> None:
    # Random123's known answer: key 0, counter 0 gives 6627e8d5. The request key undoes the seed's.
    key = torch.tensor([seed_key(0)])
    zero = torch.tensor([0])
    assert counter_draw(key, zero, zero, num_blocks=1, seed=0).item() == 0x6627E8D5


def test_draw_uses_every_bit_of_layer_position_and_key() -> None:
    def draw(key: int, position: int, layer: int) -> int:
        return int(
            counter_draw(
                torch.tensor([key]),
                torch.tensor([position]),
                torch.tensor([layer]),
                num_blocks=1,
                seed=0,
            )
        )

    words = [draw(0, 0, 0)]
    words += [draw(1 << bit, 0, 0) for bit in (0, 31, 32, 62)]
    words += [draw(0, 1 << bit, 0) for bit in (0, 31, 32, 62)]
    words += [draw(0, 0, 1 << bit) for bit in (0, 8, 31)]
    assert len(set(words)) == len(words)


def test_update_is_rounded_once_per_operation_and_skips_what_is_not_finite() -> None:
    vertical, diagonal = torch.zeros(2, 8), torch.zeros(2, 9)
    vertical[1, 4:8] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    decay, gain = torch.tensor([0.9]), torch.tensor([0.1])
    observed = ema_update(
        vertical,
        diagonal,
        torch.tensor([1]),
        torch.tensor([8]),
        torch.tensor([7]),
        torch.tensor([[3.0, NAN, -2.0, 55.0, INF, -INF]]),
        torch.tensor([[2, 0, -1]], dtype=torch.int32),  # slots 4, 5, then 0, 1
        decay,
        gain,
        block_size=2,
    )
    assert observed.tolist() == [[True, True, False]]
    expected = decay[0] * torch.tensor(1.0) + gain[0] * torch.tensor(3.0)
    assert vertical[1].tolist() == [
        *(gain[0] * torch.tensor([-2.0, 55.0])).tolist(),
        *(0.0, 0.0),
        *(expected.item(), 1.0, 1.0, 1.0),
    ]
    assert diagonal[1, [8, 7, 4]].tolist() == (gain[0] * torch.tensor([-2.0, 55.0, 3.0])).tolist()
    assert diagonal[1].count_nonzero() == 3
    assert not vertical[0].any()
    assert not diagonal[0].any()


def test_update_leaves_slots_past_the_context_alone() -> None:
    vertical, diagonal = torch.zeros(1, 4), torch.zeros(1, 5)
    observed = ema_update(
        vertical,
        diagonal,
        torch.tensor([0]),
        torch.tensor([4]),
        torch.tensor([3]),
        torch.tensor([[1.0, 1.0, 1.0, 1.0]]),
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0.5]),
        torch.tensor([0.5]),
        block_size=2,
    )
    assert vertical.tolist() == [[0.5, 0.5, 0.5, 0.0]]
    assert observed.tolist() == [[True, True]]
