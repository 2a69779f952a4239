"""The policies as tensors that are written in place while the engine runs."""

import torch
from torch import Tensor

from spin_server.algorithm.policy_rows import PolicyRows
from spin_server.errors import InputError
from spin_server.policy.policy import Policy

DEFAULT_POLICY = 0


class PolicyTable:
    """One row per policy id; row 0 is the default, and every row starts as a copy of it.

    The tensors keep their addresses for life, so that a captured CUDA graph reads what was
    written last.

    Args:
        capacity: number of rows.
        default: the policy of row 0.
        device: where the table lies.
    """

    def __init__(self, capacity: int, default: Policy, device: torch.device | str = "cpu") -> None:
        rows = PolicyRows.of([default])
        self._columns = {
            name: getattr(rows, name).repeat(capacity).to(device)
            for name in PolicyRows.__dataclass_fields__
        }
        self.capacity = capacity
        self.revision = 0

    def write(self, policy_id: int, policy: Policy) -> None:
        """Replace one row in place.

        Raises:
            InputError: no such row.
        """
        if not 0 <= policy_id < self.capacity:
            raise InputError("policy id", f"0 to {self.capacity - 1}", policy_id)
        rows = PolicyRows.of([policy])
        for name, column in self._columns.items():
            column[policy_id] = getattr(rows, name)[0]
        self.revision += 1

    def column(self, name: str) -> Tensor:
        """Get one column: [capacity]; see `PolicyRows` for their names."""
        column: Tensor = self._columns[name]
        return column

    def rows(self, policy_ids: Tensor) -> PolicyRows:
        """Gather the rows of a batch.

        Args:
            policy_ids: (int64): [requests].
        """
        return PolicyRows(**{name: column[policy_ids] for name, column in self._columns.items()})
