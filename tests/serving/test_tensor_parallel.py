"""Every rank of a tensor-parallel engine chooses and remembers the same, step by step."""

import re
from pathlib import Path

import differing_worker
import pytest

from spin_server.cli.main import main
from spin_server.engine import doctor
from spin_server.engine.ranks import check_ranks
from spin_server.errors import StartupError


def test_two_ranks_choose_and_remember_the_same_for_a_thousand_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the tests of kernels set would reach the engine.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = {"is_cpu": True, "max_num_seqs": 128, "active": ["spin", "spin_cpu"]}
    monkeypatch.setattr(doctor, "_load_plugins", lambda: found)  # test_doctor.py runs it
    assert main(["doctor", "--ranks", "2"]) == 0
    told = re.search(
        r"ok      ranks: 2 ranks chose the same blocks and hold the same histories in 1,000 of "
        r"1,000 steps \(14 requests; ([\d,]+) blocks kept, ([\d,]+) of them to explore, ([\d,]+) "
        r"skipped\)\n",
        capsys.readouterr().out,
    )
    assert told is not None
    kept, explored, skipped = (int(count.replace(",", "")) for count in told.groups())
    assert 0.2 * kept < explored < 0.3 * kept
    assert skipped > 10_000


def test_rank_that_differs_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(differing_worker.__file__).parent), prepend=":")
    extension = f"{differing_worker.__name__}.DifferingWorker"
    with pytest.raises(
        StartupError,
        match=f"rank 1 differs from rank 0 from step {differing_worker.STEP} on, in layer "
        f"{differing_worker.LAYER}: it got other scores for the same blocks; serve",
    ):
        check_ranks(None, 2, 100, on_cpu=True, worker_extension=extension)
