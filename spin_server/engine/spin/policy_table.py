"""The policies as tensors that are written in place while the engine runs."""

from dataclasses import fields

import torch
from torch import Tensor

from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.engine.spin.settings import SpinSettings
from spin_server.errors import InputError
from spin_server.policy.policy import Policy

_COLUMNS = tuple(field.name for field in fields(PolicyRows))


class PolicyTable:
    """One row per policy id; row 0 is the default, and every row starts as a copy of it.

    Args:
        capacity: number of rows.
        default: the policy of row 0.
        device: where the table lies.

    Attributes:
        columns: each [capacity]; they keep their addresses for life, so that a captured CUDA
            graph reads what was written last.
        revision: how often a row was written.
    """

    def __init__(self, capacity: int, default: Policy, device: torch.device | str = "cpu") -> None:
        row = PolicyRows.of([default])
        self.columns = PolicyRows(
            **{name: getattr(row, name).repeat(capacity).to(device) for name in _COLUMNS}
        )
        self.capacity = capacity
        self.revision = 0

    @classmethod
    def of(cls, settings: SpinSettings, device: torch.device | str = "cpu") -> "PolicyTable":
        """Make the table of a server's settings: the default policy, then the named ones."""
        table = cls(settings.capacity, settings.default.policy(), device)
        for index, named in enumerate(settings.policies.values(), start=1):
            table.write(index, named.policy())
        return table

    def write(self, policy_id: int, policy: Policy) -> None:
        """Replace one row in place.

        Raises:
            InputError: no such row.
        """
        if not 0 <= policy_id < self.capacity:
            raise InputError("policy id", f"0 to {self.capacity - 1}", policy_id)
        row = PolicyRows.of([policy])
        for name in _COLUMNS:
            getattr(self.columns, name)[policy_id] = getattr(row, name)[0]
        self.revision += 1

    def rows(self, policy_ids: Tensor) -> PolicyRows:
        """Gather the rows of a batch.

        Args:
            policy_ids: (int64): [requests].
        """
        return PolicyRows(**{name: getattr(self.columns, name)[policy_ids] for name in _COLUMNS})
