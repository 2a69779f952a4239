"""The history that SPIN keeps for each request and layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spin_server.algorithm.options import HistoryType


@dataclass(frozen=True, slots=True)
class SpinState:
    """Histories of many requests or layers; `state_rows` says which of them a batch row uses.

    Args:
        vertical: (float): [states, slots]; V, by position. Blocks instead of slots in A2.
        diagonal: (float): [states, offsets]; D, by distance from the query.
        last_observed: (int64): [states, blocks]; step of the last observation, -1 for never.
        steps: (int64): [states]; decode steps since the last reset.
    """

    vertical: Tensor
    diagonal: Tensor
    last_observed: Tensor
    steps: Tensor

    @classmethod
    def zeros(
        cls,
        num_states: int,
        *,
        num_positions: int,
        num_offsets: int,
        num_blocks: int,
        history: HistoryType = "float32",
        device: str = "cpu",
    ) -> "SpinState":
        """Make histories without an observation.

        Args:
            num_states: how many.
            num_positions, num_offsets: sizes of V and D, in slots (in blocks for A2).
            num_blocks: the largest number of blocks of a context.
            history: type of V and D.
            device: where; on `meta` they take no memory and know their size.
        """

        dtype = getattr(torch, history)
        # An engine may have set another default dtype, and another device. Zeros are not touched,
        # so that memory is taken only as histories grow.
        return cls(
            vertical=torch.zeros(num_states, num_positions, dtype=dtype, device=device),
            diagonal=torch.zeros(num_states, num_offsets, dtype=dtype, device=device),
            last_observed=torch.full(
                (num_states, num_blocks), -1, dtype=torch.int64, device=device
            ),
            steps=torch.zeros(num_states, dtype=torch.int64, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all histories."""
        tensors = (self.vertical, self.diagonal, self.last_observed, self.steps)
        return sum(tensor.nbytes for tensor in tensors)

    def reset(self, state_rows: Tensor) -> None:
        """Forget everything that these states observed; their next step is dense.

        Args:
            state_rows: (int64): [any].
        """
        self.vertical[state_rows] = 0.0
        self.diagonal[state_rows] = 0.0
        self.last_observed[state_rows] = -1
        self.steps[state_rows] = 0
