"""The only door from the admin layer to the engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spin_server.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker says of the policy table that it holds.

    Args:
        engine: number of the engine.
        rank: number of the worker in it.
        revision: of the policies in its table.
    """

    engine: int
    rank: int
    revision: int


class CanaryRow(NamedTuple):
    """Which row some of a policy's requests run with instead, and how many of a hundred."""

    row: int
    percent: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What the engine did so far, in blocks of decode steps.

    Args:
        kept: blocks that were scored in sparse steps.
        explored: of these, the ones that explored.
        skipped: blocks that were not scored.
        dense: blocks of steps that scored everything.
    """

    kept: int
    explored: int
    skipped: int
    dense: int

    @classmethod
    def total(cls, parts: Iterable["Figures"]) -> "Figures":
        """Add up."""
        found = list(parts)
        return cls(
            **{name: sum(getattr(p, name) for p in found) for name in cls.__dataclass_fields__}
        )


class EngineLink(Protocol):
    """Writes policies into the tables of a running engine, and reads them back."""

    @property
    def first_row(self) -> int:
        """The first row of the table that a tenant may have; the ones before are the launch's."""
        ...

    @property
    def reserved(self) -> frozenset[str]:
        """Names of the launch's own policies; no tenant's."""
        ...

    @property
    def capacity(self) -> int:
        """Rows of the table."""
        ...

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        """Write rows in place, in every worker.

        Returns:
            What every worker's table holds now, read back from it.

        Raises:
            Exception: a worker does not answer, or its table does not hold what was written.
        """
        ...

    async def reports(self) -> list[RankReport]:
        """Read back which revision every worker's table holds."""
        ...

    async def figures(self) -> dict[str, Figures]:
        """Read what the engine did so far, for each tenant and for `default`.

        What a canary's requests did has a name of its own, which ends in `/canary`.
        """
        ...

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, CanaryRow]) -> None:
        """Say which row each tenant's requests run with, and the canaries' of some policies."""
        ...
