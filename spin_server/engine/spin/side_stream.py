"""Launches beside the model's own, within one captured CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture


def one_graph() -> bool:
    """Whether the whole forward is being captured as one CUDA graph.

    vLLM's forward context does not say so: its V2 runner captures a full graph in mode NONE.
    Source: vllm/v1/worker/gpu/cudagraph_utils.py (CudaGraphManager.capture).
    """
    return torch.cuda.is_current_stream_capturing() and not BreakableCUDAGraphCapture.is_active()


class SideStream:
    """A second stream, for what no layer waits for.

    Elsewhere than in one graph everything stays in order: a graph in pieces may end between a fork
    and its join, and a host that launches kernel by kernel is slower than what it would hide.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._head_start = torch.zeros(1, device=device)
        self._held: list[Tensor] = []
        self._forked = False

    @contextmanager
    def branch(self, *held: Tensor, behind: bool = False) -> Iterator[None]:
        """Launch beside what follows, and after everything that went before.

        Args:
            held: what is read there; kept until the join, for its memory would be given away.
            behind: let the main stream's next launch take its place on the GPU first. Without, a
                large launch here may fill the GPU, and the main stream waits for all of it.
        """
        if not one_graph():
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._held.extend(held)
        self._forked = True
        with torch.cuda.stream(self._stream):
            if behind:
                self._head_start.zero_()  # one launch's worth of time
            yield

    def join(self) -> None:
        """Let what follows wait, on the device, for all that was launched beside."""
        if self._forked:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._held.clear()
            self._forked = False
