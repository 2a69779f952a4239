"""Misses against values worked out by hand."""

import torch

from spin_server.algorithm.miss import dense_top_k, miss_curve, miss_rate, top_k_per_block

INF = torch.inf


def test_top_k_takes_finite_visible_slots_and_the_lower_of_a_tie() -> None:
    scores = torch.tensor([[1.0, 5.0, INF, 1.0, torch.nan, -INF, 1.0, 99.0]])
    picked = dense_top_k(scores, torch.tensor([7]), top_k=3)
    assert picked.nonzero()[:, 1].tolist() == [0, 1, 3]


def test_top_k_takes_all_where_fewer_are_finite() -> None:
    scores = torch.tensor([[torch.nan, 2.0, -3.0]])
    assert dense_top_k(scores, torch.tensor([3]), top_k=512).sum() == 2


def test_miss_rate_counts_picked_slots_in_skipped_blocks() -> None:
    picked = torch.tensor([[True, True, False, True, False]])  # blocks of two: 2, 1, 0
    hits = top_k_per_block(picked, 2)
    assert hits.tolist() == [[2, 1, 0]]
    assert miss_rate(hits, torch.tensor([[False, True, True]])).tolist() == [2 / 3]
    assert miss_rate(hits * 0, torch.tensor([[False, False, False]])).tolist() == [0.0]


def test_miss_curve_follows_the_predicted_order() -> None:
    hits = torch.tensor([[1, 0, 3, 4]])
    rank = torch.tensor([[0, 3, 2, 1]])  # taken: block 0, then 3, 2, 1
    assert miss_curve(hits, rank).tolist() == [[7 / 8, 3 / 8, 0.0, 0.0]]
