"""What the device kernels of one step share, as groups of tensors.

Every tensor is allocated once and written in place, so that a captured CUDA graph reads and writes
what the next step means. Shapes: L layers, R rows, S = L * num_states histories, W blocks of the
longest context, P policies.

Under speculation a request has several rows, 1 + its drafts, which share one list of blocks. R then
counts requests, and T rows: of all requests, one request's behind the other's.
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
        num_lengths: int | None = None,
    ) -> "StepPlan":
        """Make room for the plans of all steps.

        Args:
            num_layers, num_rows, num_blocks, num_policies: L, R, W and P.
            device: where.
            num_lengths: of all rows, if that is more than R (`Drafts`).
        """

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            blocks=make(num_layers, num_rows, num_blocks),
            counts=make(num_layers, num_rows),
            lengths=make(num_layers, num_rows if num_lengths is None else num_lengths),
            step_numbers=make(num_layers, num_rows),
            outcomes=make(num_layers, num_policies, 5, dtype=torch.int64),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Which rows are whose, under speculation.

    Args:
        starts: (int32): [R + 1]; the first row of each request.
        owners: (int32): [T]; the request of each row.
    """

    starts: Tensor
    owners: Tensor

    @classmethod
    def even(cls, num_requests: int, rows_each: int, device: torch.device | str) -> "DraftRows":
        """Give every request as many rows."""
        requests = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
        return cls(requests * rows_each, requests[:-1].repeat_interleave(rows_each))

    @classmethod
    def of(cls, row_counts: Tensor, num_rows: int) -> "DraftRows":
        """Give request r row_counts[r] rows.

        Args:
            row_counts: (int32): [R].
            num_rows: T, their sum.
        """
        ends = row_counts.cumsum(0, dtype=torch.int32)
        requests = torch.arange(len(row_counts), dtype=torch.int32, device=row_counts.device)
        owners = requests.repeat_interleave(row_counts, output_size=num_rows)
        return cls(torch.nn.functional.pad(ends, (1, 0)), owners)


@dataclass(frozen=True, slots=True)
class Stash:
    """Scores of drafts until the verdict; F = drafts per request, at most.

    Row 0 of a request has happened when it is scored, and is learnt at once. The others wait: the
    next step learns those that were accepted before it plans.

    Args:
        scores: (float): [L, R, F, slots]; compact, in the order of the plan's blocks.
        slots, policies: (int64): [L, R]; see `Rows`.
        positions: (int64): [L, F, R]; of the row's token.
        num_slots: (int32): [L, F, R].
        step_numbers: (int32): [L, R]; -1 where nothing waits.
        fresh: (bool): [R]; no verdict yet.
        accepted: (int32): [R]; drafts that happened.
    """

    scores: Tensor
    slots: Tensor
    policies: Tensor
    positions: Tensor
    num_slots: Tensor
    step_numbers: Tensor
    fresh: Tensor
    accepted: Tensor

    @classmethod
    def empty(
        cls,
        num_layers: int,
        *,
        num_requests: int,
        num_drafts: int,
        num_slots: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> "Stash":
        """Make room for the drafts of a step.

        Args:
            num_layers, num_requests, num_drafts: L, R and F.
            num_slots: of the longest context.
            device, dtype: of the scores.
        """
        rows = (num_layers, num_drafts, num_requests)

        def make(*shape: int, dtype: torch.dtype, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        return cls(
            scores=make(num_layers, num_requests, num_drafts, num_slots, dtype=dtype),
            slots=make(num_layers, num_requests, dtype=torch.int64),
            policies=make(num_layers, num_requests, dtype=torch.int64),
            positions=make(*rows, dtype=torch.int64),
            num_slots=make(*rows, dtype=torch.int32),
            step_numbers=make(num_layers, num_requests, dtype=torch.int32, fill=-1),
            fresh=make(num_requests, dtype=torch.bool),
            accepted=make(num_requests, dtype=torch.int32),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)

    def judge(self, num_sampled: Tensor) -> None:
        """Take the verdict on the step that was stashed last; on any other, it means nothing.

        Args:
            num_sampled: (int): [requests of the step]; tokens that a request's rows gave, one more
                than its accepted drafts.
        """
        count = min(len(num_sampled), len(self.fresh))
        accepted = self.accepted[:count]
        verdict = num_sampled[:count].to(torch.int32) - 1
        accepted.copy_(torch.where(self.fresh[:count], verdict, accepted))
        self.fresh.zero_()

    def drop(self, slots: Tensor) -> None:
        """Let nothing be learnt for these requests' histories.

        Args:
            slots: (int64): [any].
        """
        self.step_numbers.masked_fill_(torch.isin(self.slots, slots), -1)
