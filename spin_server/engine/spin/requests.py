"""Whose history a decode row continues, and when a history starts anew.

Runner-neutral: it sees request ids and positions only. A request's history belongs to a slot, one
of a fixed number. It continues while each step's position follows the last one's; anything else
is a discontinuity, and the history starts anew. Rows of a prompt, even of one token, neither
continue nor start a history. Under speculation a step has a row for each draft too, and the next
one starts where the first rejected draft stood, or further on while the host does not know yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

NO_SLOT = -1
# Why a history started anew.
AFTER_PREFILL, AFTER_PREEMPTION, DISCONTINUITY = "prefill", "preemption", "discontinuity"
RESET_REASONS = (AFTER_PREFILL, AFTER_PREEMPTION, DISCONTINUITY)


@dataclass(slots=True)
class _Request:
    slot: int  # NO_SLOT before the first decode step, and while preempted
    policy: int
    key: int
    # Tokens known when it was last admitted: rows below this position are its prompt.
    prompt_end: int
    next_position: int | None
    reset_reason: str


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in batch order; tensors are [rows] and int64.

    Args:
        requests: ids.
        slots: the history that a decode row continues; NO_SLOT for a row of a prompt, and where
            every slot is taken.
        positions: token position of the row.
        policies: index into the policy table.
        keys: the request's 64-bit key, as a signed number.
        num_tokens: tokens of the row's request in this step.
        resets: slots whose histories start anew in this step, before anything is read.
        decodes: (bool); whether the row is a generated token's, and none of a prompt's.
    """

    requests: tuple[str, ...]
    slots: Tensor
    positions: Tensor
    policies: Tensor
    keys: Tensor
    num_tokens: Tensor
    resets: Tensor
    decodes: Tensor

    def first(self, num_rows: int) -> "StepRows":
        """Keep the first rows, and every reset."""
        return StepRows(
            self.requests[:num_rows],
            self.slots[:num_rows],
            self.positions[:num_rows],
            self.policies[:num_rows],
            self.keys[:num_rows],
            self.num_tokens[:num_rows],
            self.resets,
            self.decodes[:num_rows],
        )


class RequestTracker:
    """The live requests and their slots.

    A request takes a slot with its first decode step. One that finds none goes without, and takes
    the next that is given back.

    Args:
        num_slots: histories held at once.
        num_drafts: of a request in one step, at most.
    """

    def __init__(self, num_slots: int, num_drafts: int = 0) -> None:
        # The lowest is taken first. vLLM names finished requests in a set, whose order is each
        # process's own: ranks would hold equal histories in different places.
        self._free = list(range(num_slots))
        self._live: dict[str, _Request] = {}
        self.num_slots, self._num_drafts = num_slots, num_drafts
        # Every reason from the start, so that a counter never appears with its first event.
        self.num_resets = dict.fromkeys(RESET_REASONS, 0)

    @property
    def num_slots_in_use(self) -> int:
        """How many requests hold a slot."""
        return self.num_slots - len(self._free)

    def knows(self, request: str) -> bool:
        """Whether a request is live."""
        return request in self._live

    def admit(
        self, request: str, *, policy: int, key: int, num_known_tokens: int, resumed: bool = False
    ) -> None:
        """Note a new request; one that is live already starts over.

        Args:
            request: its id.
            policy: index into the policy table.
            key: 64 bits, as a signed number.
            num_known_tokens: length of its prompt, and of what it had generated.
            resumed: whether it comes back after a preemption.
        """
        if request in self._live:
            self.finish(request)
        self._live[request] = _Request(
            slot=NO_SLOT,
            policy=policy,
            key=key,
            prompt_end=num_known_tokens,
            next_position=None,
            reset_reason=AFTER_PREEMPTION if resumed else AFTER_PREFILL,
        )

    def preempt(self, request: str) -> None:
        """Take the slot back until the request resumes; its history is lost either way."""
        live = self._live.get(request)
        if live is None:  # aborted in the same step
            return
        self._release(live)
        live.next_position, live.reset_reason = None, AFTER_PREEMPTION

    def resume(self, request: str, num_known_tokens: int) -> None:
        """Note that a preempted request computes its tokens again.

        Args:
            num_known_tokens: its prompt and what it had generated.
        """
        self.preempt(request)  # the engine may preempt and resume within one step
        live = self._live[request]
        live.prompt_end = num_known_tokens

    def finish(self, request: str) -> None:
        """Take the slot back for good; a request that is not live is ignored."""
        live = self._live.pop(request, None)
        if live is not None:
            self._release(live)

    def _release(self, live: _Request) -> None:
        if live.slot != NO_SLOT:
            heappush(self._free, live.slot)
            live.slot = NO_SLOT

    def step(self, rows: Sequence[tuple[str, int, int]]) -> StepRows:
        """Follow one step.

        Args:
            rows: request id, position of its first token in this step, number of its tokens.
        """
        slots, positions, policies, keys, resets = [], [], [], [], []
        lengths, decodes = [num_tokens for _, _, num_tokens in rows], []
        for request, position, num_tokens in rows:
            live = self._live[request]
            few = num_tokens <= 1 + self._num_drafts
            decodes.append(few and position >= live.prompt_end)
            if decodes[-1] and live.slot == NO_SLOT and self._free:
                live.slot, live.next_position = heappop(self._free), None
            follows = decodes[-1] and live.slot != NO_SLOT
            if follows:
                expected = live.next_position
                # Two steps' drafts: of the last and of the one before, if its verdict came late.
                if expected is None or not 0 <= expected - position <= 2 * self._num_drafts:
                    if live.next_position is not None:
                        live.reset_reason = DISCONTINUITY
                    self.num_resets[live.reset_reason] += 1
                    resets.append(live.slot)
                live.next_position = position + num_tokens
            slots.append(live.slot if follows else NO_SLOT)
            positions.append(position)
            policies.append(live.policy)
            keys.append(live.key)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64)

        return StepRows(
            requests=tuple(request for request, _, _ in rows),
            slots=column(slots),
            positions=column(positions),
            policies=column(policies),
            keys=column(keys),
            num_tokens=column(lengths),
            resets=column(resets),
            decodes=torch.tensor(decodes, dtype=torch.bool),
        )
