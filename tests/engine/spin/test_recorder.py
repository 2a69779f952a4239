"""Where traces go, and what a write that fails costs."""

import shutil
from pathlib import Path

import pytest
import torch

from spin_server.engine.spin.recorder import Recorder, file_name
from spin_server.engine.spin.settings import RecordSettings


def record(recorder: Recorder, request: str) -> None:
    if recorder.wants(request, 1):
        recorder.add(
            request,
            1,
            key=0,
            policy=0,
            query_position=9,
            turn_start=True,
            scores=torch.ones(10),
            blocks=torch.tensor([0, -1], dtype=torch.int32),
        )
    recorder.finish(request)


@pytest.mark.parametrize("request_id", ["/tmp/elsewhere", "a/b", "../up", "..", "x" * 500, "é\n"])
def test_trace_stays_in_its_folder_whatever_the_client_calls_its_request(
    tmp_path: Path, request_id: str
) -> None:
    folder = tmp_path / "traces"
    recorder = Recorder(RecordSettings(folder=str(folder)), (1,))
    record(recorder, request_id)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [
        folder / f"{file_name(request_id)}.npz"
    ]
    assert recorder.num_written == 1


def test_requests_of_similar_names_get_files_of_their_own() -> None:
    assert file_name("a/b") != file_name("a_b")
    assert file_name("cmpl-1").startswith("cmpl-1-")


def test_write_that_fails_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    recorder = Recorder(RecordSettings(folder=str(folder)), (1,))
    shutil.rmtree(folder)
    record(recorder, "a")
    folder.mkdir()
    record(recorder, "b")
    assert (recorder.num_written, recorder.num_failed) == (0, 1)
    assert list(folder.iterdir()) == []
