"""A bad trace gets one error that names the key, what was expected and what came."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spin_server.errors import InputError
from spin_server.replay.trace import load_trace


def good(**changes: Any) -> dict[str, Any]:
    trace = {
        "scores": np.zeros((3, 2, 10), np.float32),
        "query_positions": np.zeros((3, 2), np.int64),
        "context_slots": np.full((3, 2), 10, np.int64),
        "accepted": np.zeros(3, np.int64),
        "turn_starts": np.zeros(3, np.bool_),
    }
    trace.update(changes)
    return {key: value for key, value in trace.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores: expected this array, got no such key"),
        ({"scores": np.zeros((3, 2), np.float32)}, "scores: expected float32 [steps, rows, slots]"),
        ({"scores": np.zeros((3, 2, 10))}, "got float64 [3, 2, 10]"),
        ({"scores": np.zeros((0, 2, 10), np.float32)}, "at least one step"),
        ({"query_positions": np.zeros((3, 1), np.int64)}, "[steps, rows] = [3, 2], got [3, 1]"),
        ({"query_positions": np.zeros((3, 2))}, "query_positions: expected int64 [steps, rows]"),
        ({"query_positions": np.full((3, 2), 2**63 - 1)}, "query_positions: expected values in"),
        ({"context_slots": np.full((3, 2), 11)}, "context_slots: expected values in 0..10, got 11"),
        ({"context_slots": np.full((3, 2), -1)}, "context_slots: expected values in 0..10, got -1"),
        ({"accepted": np.array([0, 2, 0])}, "accepted: expected values in 0..1, got 2"),
        ({"accepted": np.zeros(4, np.int64)}, "accepted: expected int64 [steps] = [3], got [4]"),
        ({"accepted": np.zeros(3, np.bool_)}, "accepted: expected int64 [steps], got bool"),
        ({"turn_starts": np.zeros(3, np.int64)}, "turn_starts: expected bool [steps], got int64"),
        ({"request_key": np.zeros(2, np.uint64)}, "request_key: expected one integer"),
        ({"request_key": np.float32(1)}, "request_key: expected one integer, got float32"),
        ({"layer": np.array("two")}, "layer: expected one integer"),
        ({"layers": np.array([1])}, "layers: expected no such key"),
        ({"scores": np.zeros((2, 3, 2, 10), np.float32)}, "layers: expected int64 [layers]"),
        (
            {"scores": np.zeros((2, 3, 2, 10), np.float32), "layers": np.array([1])},
            "layers: expected int64 [layers] = [2], got [1]",
        ),
        ({"accepted": np.array([None, 1, 2])}, "accepted: expected a plain array, got what cannot"),
    ],
)
def test_wrong_array_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **good(**changes))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive", b"\x93NUMPY\x01\x00"])
def test_file_that_is_no_archive_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"trace\.npz: expected a NumPy \.npz archive"):
        load_trace(path)


def test_truncated_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez_compressed(
        path, **good(scores=np.random.default_rng(0).random((3, 2, 10), np.float32))
    )
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"trace\.npz: expected a NumPy"):
        load_trace(path)


def test_members_that_are_no_arrays_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("scores", b"no array")
    with pytest.raises(InputError, match="scores: expected a plain array"):
        load_trace(path)


def test_header_that_asks_for_all_memory_is_named(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,)}".ljust(117)
    path = tmp_path / "trace.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("scores.npy", b"\x93NUMPY\x01\x00\x76\x00" + header + b"\n")
    with pytest.raises(InputError, match="scores: expected a plain array"):
        load_trace(path)


def test_single_array_is_no_trace(tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", np.zeros(3))
    with pytest.raises(InputError, match="got a single array"):
        load_trace(tmp_path / "scores.npy")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_trace(tmp_path / "nowhere.npz")


def test_narrow_integers_and_large_key_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        **good(
            query_positions=np.full((3, 2), 9, np.int16),
            request_key=np.uint64(2**64 - 1),
            layer=np.int32(7),
        ),
    )
    trace = load_trace(path)
    assert trace.request_key == -1  # the same 64 bits
    assert trace.layers.tolist() == [7]
    assert trace.query_positions.tolist() == [[9, 9]] * 3


def test_unknown_key_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "trace.npz", **good(comment=np.array(1)))
    load_trace(tmp_path / "trace.npz")
    assert "'comment' is not part of a trace" in caplog.text
