"""Kernels that read or write past their tensors, caught in Triton's interpreter."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter


def apart(tensor: Tensor) -> Tensor:
    """Copy a tensor to where a row before it and one behind it are nobody's."""
    row = tensor[0].numel()
    memory = torch.zeros(tensor.numel() + 2 * row, dtype=tensor.dtype, device=tensor.device)
    return memory[row : row + tensor.numel()].view_as(tensor).copy_(tensor)


def watch(monkeypatch: pytest.MonkeyPatch, known: Callable[[], Iterable[Tensor]]) -> None:
    """Let every access fail that is outside the tensors that are known when it happens.

    Compiled kernels cannot be watched.
    """
    if torch.cuda.is_available():
        return
    builder = interpreter.interpreter_builder

    def check(addresses: np.ndarray, mask: np.ndarray, num_bytes: int) -> None:
        wanted = addresses[np.broadcast_to(mask, addresses.shape)].astype(np.uint64)
        inside = np.zeros(wanted.shape, dtype=bool)
        for tensor in known():
            first = np.uint64(tensor.data_ptr())
            last = first + np.uint64(tensor.nbytes)
            inside |= (wanted >= first) & (wanted + np.uint64(num_bytes) <= last)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} accesses are out of bounds"

    def checked(original: Callable[..., Any], mask_place: int) -> Callable[..., Any]:
        def access(pointers: Any, *rest: Any) -> Any:
            element = pointers.get_element_ty().primitive_bitwidth // 8
            check(pointers.data, rest[mask_place].data, max(element, 1))
            return original(pointers, *rest)

        return access

    for name, mask_place in (("create_masked_load", 0), ("create_masked_store", 1)):
        monkeypatch.setattr(builder, name, checked(getattr(builder, name), mask_place))
