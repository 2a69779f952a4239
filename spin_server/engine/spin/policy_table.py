"""The policies as tensors that are written in place while the engine runs."""

import hashlib
from collections.abc import Mapping
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
        revision: of what was written last, if the writer counts; otherwise how often a row was.
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
        self.write_all({policy_id: policy}, self.revision + 1)

    def write_all(self, policies: Mapping[int, Policy], revision: int) -> None:
        """Replace rows in place, with one copy a column.

        Args:
            policies: by row.
            revision: what the table holds then.

        Raises:
            InputError: no such row; nothing was written.
        """
        for policy_id in policies:
            if not 0 <= policy_id < self.capacity:
                raise InputError("policy id", f"0 to {self.capacity - 1}", policy_id)
        if policies:
            rows = PolicyRows.of(list(policies.values()))
            places = torch.tensor(list(policies))
            for name in _COLUMNS:
                column = getattr(self.columns, name)
                column[places.to(column.device)] = getattr(rows, name).to(column.device)
        self.revision = revision

    def digest(self) -> str:
        """Hash what the table holds, read back from where it lies."""
        found = hashlib.sha256()
        for name in _COLUMNS:
            found.update(getattr(self.columns, name).cpu().numpy().tobytes())
        return found.hexdigest()

    def rows(self, policy_ids: Tensor) -> PolicyRows:
        """Gather the rows of a batch.

        Args:
            policy_ids: (int64): [requests].
        """
        return PolicyRows(**{name: getattr(self.columns, name)[policy_ids] for name in _COLUMNS})
