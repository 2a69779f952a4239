"""Policies as tensors, one entry per request of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spin_server.policy.policy import BUDGET_MODES, EXPLORATION_POLICIES, Policy
from spin_server.policy.ratio import BILLION


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """Policies as tensors, one entry per request of a batch, each [requests].

    Args:
        sparsity, exploration: (int64) billionths.
        exploration_policy: (int64) index into EXPLORATION_POLICIES.
        decay, gain: (float32) the EMA's weights of history and observation, each rounded once.
        budget_mode: (int64) index into BUDGET_MODES.
        probe_period: (int64) steps, 0 for never.
    """

    sparsity: Tensor
    exploration: Tensor
    exploration_policy: Tensor
    decay: Tensor
    gain: Tensor
    budget_mode: Tensor
    probe_period: Tensor

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> "PolicyRows":
        """Turn policies into tensors, in order."""
        decays = [p.ema_decay.billionths for p in policies]
        return cls(
            sparsity=torch.tensor([p.sparsity.billionths for p in policies]),
            exploration=torch.tensor([p.exploration.billionths for p in policies]),
            exploration_policy=torch.tensor(
                [EXPLORATION_POLICIES.index(p.exploration_policy) for p in policies]
            ),
            decay=torch.tensor([d / BILLION for d in decays], dtype=torch.float32),
            gain=torch.tensor([(BILLION - d) / BILLION for d in decays], dtype=torch.float32),
            budget_mode=torch.tensor([BUDGET_MODES.index(p.budget) for p in policies]),
            probe_period=torch.tensor([p.probe_period for p in policies]),
        )
