"""What the device kernels of one step share, as groups of tensors.

Every tensor is allocated once and written in place, so that a captured CUDA graph reads and writes
what the next step means. Shapes: L layers, R rows, S = L * num_states histories, W blocks of the
longest context, P policies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Histories:
    """What SPIN remembers; the history of row r in layer l is l * num_states + slots[r].

    Args:
        vertical: (float): [S, slots]; V, by position.
        diagonal: (float): [S, offsets]; D, by distance from the query.
        vertical_max: (float32): [S, W]; largest V of each block's visible slots.
        diagonal_max: (float32): [S, W]; largest D at the offsets of each block's visible slots,
            as seen by a query at slot `diagonal_at`.
        diagonal_at: (int64): [S].
        last_observed: (int32): [S, W]; step of the last observation, -1 for never.
        steps: (int32): [S]; decode steps since the last reset.
        num_states: histories per layer.
    """

    vertical: Tensor
    diagonal: Tensor
    vertical_max: Tensor
    diagonal_max: Tensor
    diagonal_at: Tensor
    last_observed: Tensor
    steps: Tensor
    num_states: int

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        *,
        num_states: int,
        num_slots: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> "Histories":
        """Make histories without an observation.

        Args:
            num_layers, num_states: L, and requests that may hold a history at once.
            num_slots: of the longest context.
            block_size: slots per block.
            device: where.
            dtype: of V and D; of their maxima it is float32 always.
        """
        num_blocks, states = -(-num_slots // block_size), num_layers * num_states

        def make(*shape: int, fill: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        return cls(
            vertical=make(states, num_blocks * block_size, dtype=dtype),
            # One more: a query may lie one slot past the last visible one.
            diagonal=make(states, num_slots + 1, dtype=dtype),
            vertical_max=make(states, num_blocks),
            diagonal_max=make(states, num_blocks),
            diagonal_at=make(states, fill=-1, dtype=torch.int64),
            last_observed=make(states, num_blocks, fill=-1, dtype=torch.int32),
            steps=make(states, dtype=torch.int32),
            num_states=num_states,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))

    def reset(self, slots: Tensor) -> None:
        """Forget what these requests' histories observed, in every layer.

        Args:
            slots: (int64): [any].
        """
        num_layers = len(self.steps) // self.num_states
        first = torch.arange(num_layers, device=slots.device) * self.num_states
        states = (first[:, None] + slots).flatten()
        for tensor in (self.vertical, self.diagonal, self.vertical_max, self.diagonal_max):
            tensor.index_fill_(0, states, 0.0)
        self.diagonal_at.index_fill_(0, states, -1)
        self.last_observed.index_fill_(0, states, -1)
        self.steps.index_fill_(0, states, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The decode rows of a step.

    Args:
        slots: (int64): [R]; which history each row continues, -1 for none.
        policies: (int64): [R]; index into the policy columns.
        keys: (int64): [R]; the request's 64-bit key.
        positions: (int64): [R]; of the row's token.
        num_slots: (int32): [R]; slots visible to the row.
    """

    slots: Tensor
    policies: Tensor
    keys: Tensor
    positions: Tensor
    num_slots: Tensor


@dataclass(frozen=True, slots=True)
class PolicyColumns:
    """Policies as tensors, one entry each: of a whole table, or of a batch's requests; [P].

    Args:
        sparsity, exploration: (int64); billionths.
        exploration_policy: (int64); see `spin_kernels.exploration_key`.
        decay, gain: (float32); weights of history and observation, each rounded once.
        probe_period: (int64); steps, 0 for never.
    """

    sparsity: Tensor
    exploration: Tensor
    exploration_policy: Tensor
    decay: Tensor
    gain: Tensor
    probe_period: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What each layer's rows score.

    Args:
        blocks: (int32): [L, R, W]; ascending; entries past `counts` are not written.
        counts: (int32): [L, R]; listed blocks.
        lengths: (int32): [L, R]; visible slots of the listed blocks.
        step_numbers: (int32): [L, R]; the history's step, -1 for a row without one.
        outcomes: (int64): [L, P, 5]; blocks exploited, explored, forced, skipped and of dense
            steps, by policy, added up over all steps.
    """

    blocks: Tensor
    counts: Tensor
    lengths: Tensor
    step_numbers: Tensor
    outcomes: Tensor

    @classmethod
    def empty(
        cls,
        num_layers: int,
        *,
        num_rows: int,
        num_blocks: int,
        num_policies: int,
        device: torch.device | str,
    ) -> "StepPlan":
        """Make room for the plans of all steps.

        Args:
            num_layers, num_rows, num_blocks, num_policies: L, R, W and P.
            device: where.
        """

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            blocks=make(num_layers, num_rows, num_blocks),
            counts=make(num_layers, num_rows),
            lengths=make(num_layers, num_rows),
            step_numbers=make(num_layers, num_rows),
            outcomes=make(num_layers, num_policies, 5, dtype=torch.int64),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)
