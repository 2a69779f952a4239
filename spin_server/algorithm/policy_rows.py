"""Policies as tensors, one entry per request of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_kernels.arguments import PolicyColumns
from spin_kernels.exploration_key import BLOCK_AGE, NONE, RANDOM, STALENESS
from spin_server.policy.policy import BUDGET_MODES, ExplorationPolicy, Policy
from spin_server.policy.ratio import BILLION

_EXPLORATION: dict[ExplorationPolicy, int] = {
    "random": RANDOM,
    "block_age": BLOCK_AGE,
    "staleness": STALENESS,
    "none": NONE,
}


@dataclass(frozen=True, slots=True)
class PolicyRows(PolicyColumns):
    """The columns that the kernels read, and what only the engine does.

    Args:
        budget_mode: (int64) index into BUDGET_MODES.
    """

    budget_mode: Tensor

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> "PolicyRows":
        """Turn policies into tensors, in order."""
        decays = [p.ema_decay.billionths for p in policies]
        return cls(
            sparsity=torch.tensor([p.sparsity.billionths for p in policies]),
            exploration=torch.tensor([p.exploration.billionths for p in policies]),
            exploration_policy=torch.tensor([_EXPLORATION[p.exploration_policy] for p in policies]),
            decay=torch.tensor([d / BILLION for d in decays], dtype=torch.float32),
            gain=torch.tensor([(BILLION - d) / BILLION for d in decays], dtype=torch.float32),
            budget_mode=torch.tensor([BUDGET_MODES.index(p.budget) for p in policies]),
            probe_period=torch.tensor([p.probe_period for p in policies]),
        )
