"""What a comparison of ranks finds, and says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spin_server.engine import ranks
from spin_server.engine.ranks import Comparison, Difference, check_ranks, find_difference
from spin_server.errors import InputError, StartupError, UnsupportedError
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

OUTCOMES = {"exploit": 70, "explore": 20, "forced": 10, "skipped": 50, "dense": 5}


def report(rank: int, **given: Any) -> dict[str, Any]:
    same = {"layers": [1, 3], "table": "t", "choices": [5, 6], "histories": [7, 8]}
    return {"rank": rank, **same, **given}


@pytest.mark.parametrize(
    ("given", "part", "layer"),
    [
        ({"histories": [7, 9]}, "histories", 3),
        ({"histories": [0, 0], "choices": [5, 0]}, "choices", 3),  # histories follow choices
        ({"histories": [0, 0], "choices": [0, 0]}, "choices", 1),
        ({"table": "u", "choices": [0, 0]}, "table", None),
    ],
)
def test_first_rank_part_and_layer_that_differ_are_named(
    given: dict[str, Any], part: str, layer: int | None
) -> None:
    reports = [report(2, **given), report(0), report(1), report(3, **given)]
    assert find_difference(4, reports) == Difference(4, 2, part, layer)
    assert find_difference(4, [report(0), report(1)]) is None


def test_rank_that_does_not_know_is_named() -> None:
    with pytest.raises(StartupError, match="rank 1: no memory"):
        find_difference(1, [report(0), {"rank": 1, "error": "no memory"}])


def ended(
    monkeypatch: pytest.MonkeyPatch, found: Comparison | None, log: str = ""
) -> dict[str, Any]:
    """Let the engine's process end with that; what it was given."""
    given: dict[str, Any] = {}

    def run(command: list[str], *, stdout: Any, **_: Any) -> Any:
        given.update(json.loads(command[-1]))
        stdout.write(log.encode())
        if found is not None:
            Path(given["out"]).write_text(json.dumps(ranks.dataclasses.asdict(found)))
        return ranks.subprocess.CompletedProcess(command, 0 if found else 1)

    monkeypatch.setattr(ranks.subprocess, "run", run)
    return given


def test_ranks_that_agree_are_told_with_what_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ended(monkeypatch, Comparison(300, 4, 290, OUTCOMES, None))
    assert check_ranks(None, 2, 300, on_cpu=True) == (
        "2 ranks chose the same blocks and hold the same histories in 300 of 300 steps "
        "(4 requests; 100 blocks kept, 20 of them to explore, 50 skipped)"
    )
    assert (given["ranks"], given["steps"], Path(given["model"]).name) == (2, 300, "tiny")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            Comparison(41, 2, 30, OUTCOMES, Difference(41, 1, "choices", 3)),
            "rank 1 differs from rank 0 from step 41 on, in layer 3: it chose other blocks from "
            "equal histories; serve on one rank or with --spin-off, and report this line",
        ),
        (
            Comparison(1, 2, 0, OUTCOMES, Difference(1, 1, "table", None)),
            "from step 1 on: its table of policies holds other values; serve",
        ),
        # Equal, for nothing was chosen.
        (Comparison(3, 2, 0, OUTCOMES, None), "nothing was compared; give more --steps"),
        (Comparison(3, 2, 1, OUTCOMES | {"explore": 0}, None), "nothing was compared"),
    ],
)
def test_ranks_that_differ_or_did_nothing_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, found: Comparison, message: str
) -> None:
    ended(monkeypatch, found)
    with pytest.raises(StartupError, match=message):
        check_ranks(None, 2, 100, on_cpu=True)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "INFO x\n(Worker) ValueError: no room\nTraceback\nRuntimeError: failed",
            "ended: (Worker) ValueError: no room; its log: ",
        ),
        ("INFO x\nKilled\n", "ended: Killed; its log: "),
        ("", "ended: nothing said; its log: "),
    ],
)
def test_engine_that_does_not_start_is_told_by_its_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, message: str
) -> None:
    monkeypatch.setattr(ranks.tempfile, "tempdir", str(tmp_path))
    ended(monkeypatch, None, log)
    with pytest.raises(StartupError, match=re.escape(message)):
        check_ranks(None, 2, 100, on_cpu=True)
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == log


def test_what_cannot_be_run_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--ranks: expected MODEL beside it on a GPU, got none"):
        check_ranks(None, 2, 100, on_cpu=False)
    write_checkpoint(tmp_path / "tiny", tiny_config({"max_position_embeddings": 4096}), seed=0)
    with pytest.raises(InputError, match=r"expected contexts of 8,192 tokens.*got 4,096"):
        check_ranks(str(tmp_path / "tiny"), 2, 100, on_cpu=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedError, match="no sparse-attention indexer"):
        check_ranks(str(tmp_path), 2, 100, on_cpu=True)
