"""What one worker process holds of SPIN, gathered in one place.

A worker serves one model, so there is one of these per process.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from spin_server.engine.spin.layers import FALLBACKS, OUTCOMES, SpinLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.recorder import Recorder
from spin_server.engine.spin.requests import RESET_REASONS, RequestTracker
from spin_server.engine.spin.settings import SpinSettings

if TYPE_CHECKING:  # needs Triton, which a CPU engine does without
    from spin_server.engine.spin.device import DeviceLayers
    from spin_server.engine.spin.side_stream import SideStream

AnyLayers: TypeAlias = "SpinLayers | DeviceLayers"


@dataclass(slots=True)
class WorkerSpin:
    """Everything of SPIN in this process.

    Args:
        table: the policies, once the first layer is built.
        tracker: the live requests, once the first step ran.
        recorder: what is being recorded, if anything.
        layers: the histories, once the first layer is built.
        side: a GPU's second stream, beside the layers.
        follows: whether the model runner tells us of its requests and steps.
        warming: whether vLLM warms a GPU up, with requests of its own.
        overhead_seconds, overhead_calls: time of SPIN's own work in the layers, and their calls.
    """

    table: PolicyTable | None = None
    tracker: RequestTracker | None = None
    recorder: Recorder | None = None
    layers: "AnyLayers | None" = None
    side: "SideStream | None" = None
    follows: bool = False
    warming: bool = False
    overhead_seconds: float = 0.0
    overhead_calls: int = 0

    def policy_table(
        self, settings: SpinSettings, device: torch.device | str = "cpu"
    ) -> PolicyTable:
        """Get the policy table; the first call fills it from the settings."""
        if self.table is None:
            self.table = PolicyTable.of(settings, device)
        return self.table

    @property
    def beside(self) -> "SideStream":
        """Get a GPU's second stream."""
        assert self.side is not None  # made with the layers
        return self.side

    @property
    def min_context(self) -> int:
        """Tokens; contexts of no more are scored densely. 0 if SPIN is off."""
        return 0 if self.layers is None else self.layers.dense_slots * self.layers.compress_ratio

    def requests(self) -> RequestTracker:
        """Get the tracker of the live requests; the layers say how many histories there are."""
        if self.tracker is None:
            assert self.layers is not None
            self.tracker = RequestTracker(self.layers.num_states, self.layers.num_drafts)
        return self.tracker

    def snapshot(self) -> dict[str, Any]:
        """Read every counter, as plain numbers.

        Returns:
            `layers` {number: {outcome: blocks}}, `policies` {row: {outcome: blocks}} of the rows
            that were ever used, `fallbacks` {reason: rows}, `resets` {reason:
            times}, `slots_in_use`, `slots`, `min_context` (tokens), `traces` {result: files},
            `overhead` {seconds, calls}, `revision`.
        """
        layers = self.layers
        return {
            "layers": {
                number: dict(zip(OUTCOMES, outcomes, strict=True))
                for number, outcomes in zip(layers.numbers, layers.outcomes.tolist(), strict=True)
            }
            if layers
            else {},
            "policies": _by_policy(layers.policy_outcomes) if layers else {},
            "fallbacks": dict(zip(FALLBACKS, layers.fallbacks.tolist(), strict=True))
            if layers
            else {},
            "overhead": {"seconds": self.overhead_seconds, "calls": self.overhead_calls},
            "resets": dict(self.tracker.num_resets)
            if self.tracker
            else dict.fromkeys(RESET_REASONS, 0),
            "slots_in_use": self.tracker.num_slots_in_use if self.tracker else 0,
            "slots": layers.num_states if layers else 0,
            "min_context": self.min_context,
            "traces": {
                "written": self.recorder.num_written if self.recorder else 0,
                "failed": self.recorder.num_failed if self.recorder else 0,
            },
            "revision": self.table.revision if self.table else 0,
        }


def _by_policy(outcomes: torch.Tensor) -> dict[int, dict[str, int]]:
    outcomes = outcomes.cpu()
    used = outcomes.any(1).nonzero()[:, 0]
    return {
        row: dict(zip(OUTCOMES, counts, strict=True))
        for row, counts in zip(used.tolist(), outcomes[used].tolist(), strict=True)
    }


@cache
def worker_spin() -> WorkerSpin:
    """Get this process's one instance."""
    return WorkerSpin()
