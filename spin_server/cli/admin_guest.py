"""The admin API as a guest of the server: its arguments, and the glue between the two."""

import argparse
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import REGISTRY

from spin_server.admin.engine_link import Figures, RankReport
from spin_server.admin.server import AdminServer
from spin_server.engine.spin.control import EngineControl
from spin_server.errors import InputError
from spin_server.policy.policy import Policy

DEFAULT_PORT = 8081


@dataclass(frozen=True, slots=True)
class AdminArguments:
    """Where the admin API keeps its documents, and where it listens."""

    store: Path
    host: str
    port: int


def read_admin_arguments(argv: Sequence[str]) -> tuple[AdminArguments | None, list[str]]:
    """Take the `--admin-*` arguments out of a command line.

    Returns:
        None if no store is named: then there is no admin API; and what is left.

    Raises:
        InputError: an argument that does not make sense.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--admin-store", type=Path)
    parser.add_argument("--admin-host")
    parser.add_argument("--admin-port", type=int)
    try:
        ours, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("serve", "the admin API's arguments", error) from None
    for argument in rest:
        if argument.startswith("--admin-"):
            raise InputError("serve", "one of the admin API's arguments (see --help)", argument)
    if ours.admin_store is None:
        if ours.admin_host is not None or ours.admin_port is not None:
            raise InputError("serve", "--admin-store FILE beside --admin-host and -port", "none")
        return None, rest
    port = DEFAULT_PORT if ours.admin_port is None else ours.admin_port
    if not 0 <= port < 65536:
        raise InputError("--admin-port", "0 (any) to 65535", port)
    return AdminArguments(ours.admin_store, ours.admin_host or "127.0.0.1", port), rest


class ControlLink:
    """`EngineLink` over the engine's own control."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self.first_row, self.capacity = control.first_row, control.capacity

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        """See `EngineLink`."""
        found = await self._control.apply(revision, rows)
        return [RankReport(r.engine, r.rank, r.revision) for r in found]

    async def reports(self) -> list[RankReport]:
        """See `EngineLink`."""
        found = await self._control.reports()
        return [RankReport(r.engine, r.rank, r.revision) for r in found]

    async def figures(self) -> dict[str, Figures]:
        """See `EngineLink`."""
        found = await self._control.outcomes()
        return {
            name: Figures(
                kept=blocks["exploit"] + blocks["explore"] + blocks["forced"],
                explored=blocks["explore"],
                skipped=blocks["skipped"],
                dense=blocks["dense"],
            )
            for name, blocks in found.items()
        }

    def name_rows(self, rows: Mapping[str, int]) -> None:
        """See `EngineLink`."""
        self._control.name_rows(rows)


class AdminGuest:
    """Runs the admin API beside a server.

    Args:
        arguments: the admin API's.
        launch: the default policy that the server is started with.
    """

    def __init__(self, arguments: AdminArguments, launch: Policy) -> None:
        self._arguments, self._launch = arguments, launch

    def __call__(self, control: EngineControl) -> AbstractAsyncContextManager[None]:
        """Start it, and stop it in the end."""
        return self._run(control)

    @asynccontextmanager
    async def _run(self, control: EngineControl) -> AsyncIterator[None]:
        ours = self._arguments
        server = AdminServer(
            ours.store, ours.host, ours.port, self._launch, ControlLink(control), REGISTRY
        )
        try:
            await server.start()
            made = f"; its first key is in {server.key_file}" if server.made_key else ""
            print(f"\nspin-server: admin API at {server.url}{made}", flush=True)
            yield
        finally:
            await server.stop()
