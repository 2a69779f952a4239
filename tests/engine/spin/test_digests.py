"""Hashes tell what is stored, and where."""

from types import SimpleNamespace

import pytest
import torch

from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin import digests
from spin_server.engine.spin.digests import checksums, layer_checksums
from spin_server.engine.spin.layers import SpinLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.worker_state import worker_spin
from spin_server.engine.worker import SpinWorkerExtension
from spin_server.policy.policy import Policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_hash_changes_with_any_value_and_with_any_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 25).view(2, 3, 4).to(dtype)
    first, second = checksums(values)
    assert first != second
    for place in range(12):
        changed = values.clone()
        changed.view(2, -1)[1, place] += 8
        assert checksums(changed)[0] == first
        assert checksums(changed)[1] != second
    swapped = values.clone()
    swapped[1, 0, 0], swapped[1, 2, 3] = values[1, 2, 3], values[1, 0, 0]
    assert checksums(swapped)[1] != second


def test_hash_tells_zeros_apart_and_knows_equal_nans() -> None:
    assert checksums(torch.tensor([[0.0]])) != checksums(torch.tensor([[-0.0]]))
    nans = torch.full((2, 3), torch.nan)
    assert checksums(nans)[0] == checksums(nans)[1]


def test_hash_does_not_depend_on_how_much_is_hashed_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    whole = checksums(values)
    assert [checksums(one[None])[0] for one in values] == whole
    monkeypatch.setattr(digests, "_PART", 100)
    assert checksums(values) == whole


def test_layers_hash_covers_every_tensor_in_order() -> None:
    one, other = torch.arange(8.0), torch.arange(8.0).flip(0)
    found = layer_checksums(2, one, other)
    assert len(found) == len(set(found)) == 2
    assert layer_checksums(2, other, one) != found
    assert layer_checksums(2, one, other.clone()) == found
    one[0] = 1.0
    changed = layer_checksums(2, one, other)
    assert (changed[0] == found[0], changed[1] == found[1]) == (False, True)


def test_choices_are_hashed_for_the_metrics_only_where_another_rank_could_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = SpinLayers(
        (1, 4),
        SpinOptions(),
        PolicyTable(1, Policy()),
        num_states=1,
        max_slots=64,
        compress_ratio=4,
        dense_slots=512,
    )
    monkeypatch.setattr(worker_spin(), "layers", layers)
    worker = SpinWorkerExtension()
    worker.rank = 1
    for ranks, choices in ((1, None), (2, [0, 0])):
        worker.parallel_config = SimpleNamespace(world_size=ranks)
        found = worker.spin_snapshot()
        assert found["rank"] == 1
        assert found.get("choices") == choices
