"""Brings the engine to the store's revision, and keeps it there.

Rows are written in place while requests run; a request that is in flight takes the new policy at
its next step. Changes that come in quick succession share a write.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

from spin_server.admin.administration import Administration
from spin_server.admin.documents import DEFAULT
from spin_server.admin.engine_link import CanaryRow, EngineLink, RankReport
from spin_server.admin.errors import RefusedError
from spin_server.admin.state import State
from spin_server.policy.policy import Policy

logger = logging.getLogger(__name__)

_MOST_PAUSE_SECONDS = 30.0
_CANARY = "/canary"  # ends no tenant's name
_VERIFY_SECONDS = 30.0  # between two looks at tables that nobody wrote to


class RowAllotment:
    """Which row of the policy table each tenant has.

    A row that becomes free is given away last of all free rows: requests of the tenant that had it
    may still be running.

    Args:
        rows: that may be given away.
    """

    def __init__(self, rows: range) -> None:
        self._free = deque(rows)
        self._rows: dict[str, int] = {}

    def has(self, tenant: str) -> bool:
        """Say whether a tenant has a row."""
        return tenant in self._rows

    def allot(self, tenants: list[str]) -> dict[str, int]:
        """Give every tenant a row; tenants that are gone lose theirs. None left: no row."""
        for gone in self._rows.keys() - set(tenants):
            self._free.append(self._rows.pop(gone))
        for tenant in tenants:
            if tenant not in self._rows and self._free:
                self._rows[tenant] = self._free.popleft()
        return dict(self._rows)


class Applier:
    """Applies every revision of the store to the engine.

    Args:
        administration: whose documents are applied.
        link: to the engine.
        period_seconds: how often it looks what others wrote.
        pause_seconds: least time between two writes to the engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        administration: Administration,
        link: EngineLink,
        *,
        period_seconds: float = 1.0,
        pause_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._administration, self._link, self._clock = administration, link, clock
        self._period, self._pause = period_seconds, pause_seconds
        self._allotment = RowAllotment(range(link.first_row, link.capacity))
        self._wake = asyncio.Event()
        self._moved = asyncio.Condition()
        self._sent: dict[int, Policy] = {}  # rows that the engine is known to hold
        self._named: dict[str, int] = {}  # rows by tenant, as the engine was told
        self._tried: dict[str, CanaryRow] = {}
        self._ended: dict[int, str] = {}  # rows of canaries that are over, and whose they were
        self.reports: list[RankReport] = []  # of the last write
        self.applied: int | None = None  # revision that the whole engine holds
        self._held: tuple[int, datetime | None] | None = None  # that, and its next time limit
        self.trouble: str | None = None  # why the engine is behind
        self.unserved: list[str] = []  # tenants that this server has no row for
        self.untried: list[str] = []  # policies whose canary it has no row for
        self._behind_since: float | None = clock()

    async def run(self) -> None:
        """Watch the store and apply what it holds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(self._administration.refresh))
            group.create_task(self._watch(self._end_limits))
            group.create_task(self._apply())

    async def _watch(self, look: Callable[[], object]) -> None:
        """Look at the store again and again; no engine can hold this up.

        What others wrote is looked at apart from what is to be written: a write may have to wait.
        """
        while True:
            try:
                await asyncio.to_thread(look)
            except Exception:  # the next look may succeed
                logger.exception("admin: the store could not be looked at")
            if self._note_behind():
                self._wake.set()
            await asyncio.sleep(self._period)

    def _end_limits(self) -> None:
        with contextlib.suppress(RefusedError):  # it is told as the store's trouble
            self._administration.expire()

    async def _apply(self) -> None:
        """Bring the engine up to date; a failed write is tried again, more and more slowly."""
        pause, verified = self._pause, self._clock()
        while True:
            try:
                await self.catch_up()
                if self._clock() - verified > _VERIFY_SECONDS:
                    verified = self._clock()
                    await self._link.reports()
                pause = self._pause
            except Exception as error:  # whatever the engine's client raises
                self._note(f"{type(error).__name__}: {error}")
                pause = min(max(pause, 0.5) * 2, _MOST_PAUSE_SECONDS)
            await asyncio.sleep(pause)
            if self.trouble is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._period)
                self._wake.clear()

    def _note(self, trouble: str) -> None:
        self._sent = {}  # part of it may have arrived: send everything next time
        if trouble != self.trouble:
            logger.error("admin: the engine does not take the policies: %s", trouble)
        self.trouble = trouble
        if self._behind_since is None:
            self._behind_since = self._clock()

    async def catch_up(self) -> None:
        """Write what the engine lacks, if anything.

        Raises:
            Exception: the engine does not take it.
        """
        state = self._administration.in_force
        # Of one revision, what is in force changes with the time limits that have passed.
        held = state.revision, state.next_expiry
        if held == self._held and self.trouble is None:
            self._behind_since = None
            return
        names, canaries = self._allot(state)
        rows = self._rows(state, names, canaries)
        lacking = {row: policy for row, policy in rows.items() if self._sent.get(row) != policy}
        self._take_rows_away(names, canaries)
        reports = await self._link.apply(state.revision, lacking)
        # Requests may be sent to a row only once it holds the tenant's policy.
        self._link.name_rows(names, canaries)
        self._named, self._tried = names, canaries
        async with self._moved:
            self._sent, self.reports, self.applied = rows, reports, state.revision
            self._held = held
            self.trouble = self._behind_since = None
            self._moved.notify_all()

    def _allot(self, state: State) -> tuple[dict[str, int], dict[str, CanaryRow]]:
        """Find a row for every tenant, and for as many canaries as there is room for."""
        reserved = self._link.reserved
        tenants = [name for name in state.tenants if name not in reserved]
        room = max(0, self._link.capacity - self._link.first_row - len(tenants))
        # No tenant goes without for a canary, and no canary for a newer one.
        wanted = [name for name in state.canaries if name not in reserved]
        wanted.sort(key=lambda name: not self._allotment.has(name + _CANARY))
        found = self._allotment.allot(tenants + [name + _CANARY for name in wanted[:room]])
        names = {name: found[name] for name in tenants if name in found}
        canaries = {
            name: CanaryRow(found[name + _CANARY], percent)
            for name, percent in state.canaries.items()
            if name + _CANARY in found
        }
        rowless = (
            sorted(set(state.tenants) - names.keys()),
            sorted(state.canaries.keys() - canaries.keys()),
        )
        if rowless != (self.unserved, self.untried):
            self.unserved, self.untried = rowless
            if (trouble := self.unserved_trouble()) is not None:
                logger.warning("admin: %s", trouble)
        for name, canary in self._tried.items():
            if not _has_row(canaries, name, canary.row):
                self._ended[canary.row] = name
        for row in (*names.values(), *(canary.row for canary in canaries.values())):
            self._ended.pop(row, None)
        return names, canaries

    def _take_rows_away(self, names: dict[str, int], canaries: dict[str, CanaryRow]) -> None:
        """Let no new request have a row that is somebody else's from the next write on."""
        kept = {name: row for name, row in self._named.items() if names.get(name) == row}
        tried = {
            name: canary
            for name, canary in self._tried.items()
            if _has_row(canaries, name, canary.row)
        }
        if (kept, tried) != (self._named, self._tried):
            self._link.name_rows(kept, tried)
            self._named, self._tried = kept, tried

    def _rows(
        self, state: State, names: dict[str, int], canaries: dict[str, CanaryRow]
    ) -> dict[int, Policy]:
        rows = {0: state.effective(DEFAULT).policy}
        plain = state.tenants_without_policy
        for name, row in names.items():
            rows[row] = rows[0] if name in plain else state.effective(name).policy
        for name, canary in canaries.items():
            rows[canary.row] = state.effective(name, canary=True).policy
        # Requests that began as a canary's go on with what everybody has.
        for row, name in self._ended.items():
            rows[row] = state.effective(name).policy
        return rows

    async def reach(self, revision: int, timeout_seconds: float) -> bool:
        """Wait until the engine holds a revision, or a later one.

        Returns:
            Whether it does.
        """
        self._note_behind()
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_seconds), self._moved:
                await self._moved.wait_for(
                    lambda: self.applied is not None and self.applied >= revision
                )
        except TimeoutError:
            return False
        return True

    def unserved_trouble(self, names: set[str] | None = None) -> str | None:
        """Say which tenants' requests this server refuses, or whose canary it leaves out.

        Args:
            names: of the policies to say it of; None: of all.
        """
        unserved, untried = (
            [name for name in found if names is None or name in names]
            for found in (self.unserved, self.untried)
        )
        if unserved:
            return (
                f"no row for {len(unserved)} tenants, such as {unserved[0]}: their requests "
                "are refused here (--spin-capacity, or a policy of --spin-policies with the same "
                "name)"
            )
        if untried:
            return (
                f"no row for {len(untried)} canaries, such as {untried[0]}'s: nobody tries them "
                "here (--spin-capacity, or a policy of --spin-policies with the same name)"
            )
        return None

    def behind_seconds(self) -> float:
        """For how long the engine has lacked the store's revision; 0 if it holds it."""
        self._note_behind()
        return 0.0 if self._behind_since is None else self._clock() - self._behind_since

    def _note_behind(self) -> bool:
        """Say whether the engine lacks something, and note since when."""
        behind = self._administration.state.revision != self.applied
        if not behind and self.trouble is None:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = self._clock()
        return behind


def _has_row(canaries: dict[str, CanaryRow], name: str, row: int) -> bool:
    return name in canaries and canaries[name].row == row
