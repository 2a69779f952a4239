"""Work beside the model's own, within one captured graph."""

from typing import Any

import pytest
import torch

from spin_server.engine.spin import side_stream


class NoStream:
    """Stands in for a CUDA stream where there is no GPU: using it is a failure."""

    def __init__(self, _: Any) -> None:
        pass


def test_outside_of_a_capture_everything_stays_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    beside = side_stream.SideStream(torch.device("cpu"))
    done = []
    with beside.branch(torch.zeros(1), behind=True):
        done.append("beside")
    beside.join()
    assert done == ["beside"]
    assert beside._held == []


@pytest.mark.gpu
def test_captured_branch_runs_after_what_went_before_and_before_the_join() -> None:
    device = torch.device("cuda")
    beside = side_stream.SideStream(device)
    source, held, found = (torch.zeros(1 << 24, device=device) for _ in range(3))
    total, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.copy_(source * 2)
        with beside.branch(held, behind=True):
            assert torch.cuda.current_stream() == beside._stream
            for _ in range(50):
                found.add_(held)
        source.add_(1)  # beside the branch, which reads `held` alone
        assert beside._held
        beside.join()
        assert not beside._held
        total.copy_(found.sum() / len(found))
    for step in range(1, 4):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert float(total) == 100 * (step - 1)
    assert float(source[0]) == 3
