"""The replay command: options in, one JSON file or one line of error out."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spin_server.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    steps, slots = 8, 1024
    rng = np.random.default_rng(3)
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        scores=rng.standard_normal((steps, 1, slots), np.float32),
        query_positions=np.arange(1020, 1020 + steps)[:, None],
        context_slots=np.full((steps, 1), slots),
        accepted=np.zeros(steps, np.int64),
        turn_starts=np.zeros(steps, np.bool_),
    )
    return path


def run(trace: Path, *options: str) -> dict[str, Any]:
    out = trace.with_name("result.json")
    assert main(["replay", str(trace), "--out", str(out), *options]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_defaults_keep_seventy_percent_after_a_dense_step(trace: Path) -> None:
    result = run(trace)
    first, *rest = result["steps"]
    assert first == {
        "blocks": list(range(16)),
        "scored_blocks": 16,
        "budget": [16],
        "miss": [0.0],
        "dense": True,
    }
    # 16 blocks at 30%: ceil(0.7 * 16) = 12, and 4 skipped.
    assert [step["scored_blocks"] for step in rest] == [12] * 7
    assert result["realized_sparsity"] == pytest.approx(4 / 16)
    assert result["effective_sparsity"] == pytest.approx(7 * 4 / (8 * 16))
    assert result["target_sparsity"] == 0.3
    assert result["options"]["exploration"] == 0.05


def test_summary_is_printed_when_the_result_goes_to_a_file(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(trace)
    summary = capsys.readouterr().out
    assert "realized_sparsity 0.2500, effective_sparsity 0.2188, target_sparsity 0.3000" in summary
    assert summary.count("\n") == 1


def test_result_goes_to_standard_output_by_default(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace)]) == 0
    assert len(json.loads(capsys.readouterr().out)["steps"]) == 8


def test_layers_of_a_multi_layer_trace_equal_their_own_replays(trace: Path) -> None:
    single = dict(np.load(trace))
    other = np.random.default_rng(4).standard_normal(single["scores"].shape, np.float32)
    both = trace.with_name("both.npz")
    np.savez(
        both,
        **{**single, "scores": np.stack([single["scores"], other]), "layers": np.array([2, 5])},
    )
    together = run(both)["layers"]
    for index, (layer, scores) in enumerate([(2, single["scores"]), (5, other)]):
        alone = trace.with_name(f"layer{layer}.npz")
        np.savez(alone, **{**single, "scores": scores, "layer": np.array(layer)})
        expected = run(alone)
        assert together[index]["layer"] == layer
        assert together[index]["steps"] == expected["steps"]
        assert together[index]["mean_miss"] == expected["mean_miss"]
    assert together[0]["steps"] != together[1]["steps"]


def test_seed_and_request_key_change_what_is_explored(trace: Path) -> None:
    base = run(trace, "--exploration", "0.3")
    assert run(trace, "--exploration", "0.3")["steps"] == base["steps"]
    assert run(trace, "--exploration", "0.3", "--seed", "1")["steps"] != base["steps"]
    keyed = dict(np.load(trace), request_key=np.uint64(1))
    np.savez(trace, **keyed)
    assert run(trace, "--exploration", "0.3")["steps"] != base["steps"]


def test_probes_are_dense_and_give_miss_curves(trace: Path) -> None:
    result = run(trace, "--probe-period", "3", "--top-k", "64")
    assert [step["dense"] for step in result["steps"]] == [True, False, False] * 2 + [True, False]
    assert "miss_curve" not in result["steps"][0]  # nothing was predicted yet
    curve = result["steps"][3]["miss_curve"]
    assert len(curve) == 16
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] == 0.0


def test_null_budgets_are_no_budgets(trace: Path) -> None:
    budgets = trace.with_name("budgets.json")
    budgets.write_text("null")
    assert run(trace, "--budgets", str(budgets))["steps"] == run(trace)["steps"]
    budgets.write_text(json.dumps([9] * 8))
    result = run(trace, "--budgets", str(budgets))
    assert [step["scored_blocks"] for step in result["steps"]] == [16] + [9] * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "1.5"], "--sparsity: expected a number from 0 to 1, got 1.5"),
        (["--sparsity", "nan"], "--sparsity: expected a number from 0 to 1, got 'nan'"),
        (["--sparsity", "half"], "--sparsity: expected a number from 0 to 1, got 'half'"),
        (["--exploration", "-0.1"], "--exploration: expected a number from 0 to 1"),
        (["--ema-decay", "2"], "--ema-decay: expected a number from 0 to 1"),
        (["--sparsity", "0.1234567891"], "--sparsity: expected at most 9 decimals"),
        (["--variant", "A0", "--exploration", "0.1"], "exploration: expected 0 with variant A0"),
        (["--block-size", "0"], "block_size: expected at least 1, got 0"),
        (["--top-k", "-3"], "top_k: expected at least 1, got -3"),
        (["--probe-period", "0"], "--probe-period: expected at least 1, got 0"),
        (["--budgets", "missing.json"], "--budgets missing.json: expected a readable file"),
        (["--out", "/nowhere/result.json"], "--out /nowhere/result.json: expected a writable file"),
        (["--out", "/"], "--out /: expected a writable file"),
        (["--out", "x" * 300], "--out xxx"),
        (["--top-k", "9" * 23], "--top-k: expected at most 1048576"),
        (["--block-size", str(2**63)], "--block-size: expected at most 1048576"),
        (["--probe-period", "9" * 23], "--probe-period: expected at most 1048576"),
    ],
)
def test_bad_option_is_one_line_and_status_2(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["replay", str(trace), *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"spin-server: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("{}", "got dict"),
        ("[1, 2.5]", "got 2.5 at step 1"),
        ("[true]", "got True at step 0"),
        ("[-1]", "got -1 at step 0"),
        ("[1, 2]", "expected one block budget per step (8), got 2 entries"),
        ("[", "got no JSON"),
        ("[" + "9" * 5000 + "]", "got no JSON"),
    ],
)
def test_bad_budgets_are_named(
    trace: Path, capsys: pytest.CaptureFixture[str], content: str, got: str
) -> None:
    budgets = trace.with_name("budgets.json")
    budgets.write_text(content)
    assert main(["replay", str(trace), "--budgets", str(budgets)]) == 2
    assert got in capsys.readouterr().err


def test_pipe_is_written_through_and_stays_a_pipe(trace: Path) -> None:
    pipe = trace.with_name("pipe")
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    assert main(["replay", str(trace), "--out", str(pipe)]) == 0
    reader.join(30)
    assert len(json.loads(received[0])["steps"]) == 8
    assert pipe.is_fifo()


def test_link_is_followed(trace: Path) -> None:
    target, link = trace.with_name("target.json"), trace.with_name("link.json")
    link.symlink_to(target)
    assert main(["replay", str(trace), "--out", str(link)]) == 0
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["steps"]) == 8


def test_miss_curve_is_what_a_replay_at_that_budget_misses(trace: Path) -> None:
    # Two rows with different queries: the curve is row 0's.
    arrays = dict(np.load(trace))
    rng = np.random.default_rng(5)
    arrays["scores"] = rng.standard_normal((8, 2, 1024), np.float32)
    arrays["query_positions"] = arrays["query_positions"] + np.array([[0, 40]])
    arrays["context_slots"] = np.full((8, 2), 1024)
    arrays["accepted"] = np.ones(8, np.int64)
    np.savez(trace, **arrays)
    options = ("--exploration", "0", "--top-k", "64", "--mask", "row0", "--sparsity", "0.4")
    curve = run(trace, *options, "--probe-period", "5")["steps"][5]["miss_curve"]
    budgets = trace.with_name("budgets.json")
    for budget in range(2, 17):
        budgets.write_text(json.dumps([10] * 5 + [budget] * 3))
        step = run(trace, *options, "--budgets", str(budgets))["steps"][5]
        assert step["scored_blocks"] == budget
        assert step["miss"][0] == curve[budget - 1], budget
    assert len(set(curve)) > 5


def test_failed_replay_leaves_an_earlier_result_alone(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trace.with_name("result.json")
    out.write_text("earlier")
    assert main(["replay", str(trace), "--out", str(out), "--sparsity", "7"]) == 2
    assert out.read_text() == "earlier"
    assert [p.name for p in trace.parent.iterdir() if "partial" in p.name] == []
