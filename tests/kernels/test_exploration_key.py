"""What each exploration policy prefers."""

import torch

from spin_kernels.exploration_key import BLOCK_AGE, RANDOM, exploration_key, staleness_rank


def keys(policy: int, *, rows: int, blocks: int, request: int = 5, layer: int = 0) -> torch.Tensor:
    return exploration_key(
        torch.full((rows,), policy),
        torch.zeros(rows, blocks),
        torch.arange(blocks).expand(rows, blocks).flip(1),
        torch.ones(rows, blocks, dtype=torch.bool),
        request_keys=torch.full((rows,), request),
        query_positions=torch.arange(rows),
        layers=torch.full((rows,), layer),
        seed=0,
    )


def test_random_takes_every_block_equally_often() -> None:
    rows, blocks = 20_000, 10
    first = keys(RANDOM, rows=rows, blocks=blocks).argmin(1)
    counts = torch.bincount(first, minlength=blocks).double()
    expected = rows / blocks
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, one in a thousand


def test_random_differs_by_request_layer_and_position_and_by_nothing_else() -> None:
    base = keys(RANDOM, rows=4, blocks=100)
    assert torch.equal(base, keys(RANDOM, rows=4, blocks=100))
    assert not torch.equal(base, keys(RANDOM, rows=4, blocks=100, request=6))
    assert not torch.equal(base, keys(RANDOM, rows=4, blocks=100, layer=1))
    assert len({tuple(row.tolist()) for row in base}) == 4
    # A wider table draws the same words for the blocks that both have.
    assert torch.equal(base, keys(RANDOM, rows=4, blocks=300)[:, :100])


def test_block_age_prefers_the_oldest_observation() -> None:
    assert keys(BLOCK_AGE, rows=1, blocks=5).argsort(stable=True).tolist() == [[4, 3, 2, 1, 0]]


def test_staleness_counts_strictly_younger_and_strictly_lower_visible_blocks() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 9.0]])
    observed = torch.tensor([[4, -1, 2, 4, -1, 7]])
    visible = torch.tensor([[True] * 5 + [False]])
    # Younger than each: 0, 3, 2, 0, 3; lower than each: 2, 3, 3, 0, 0.
    assert staleness_rank(scores, observed, visible)[0, :5].tolist() == [2, 6, 5, 0, 3]
