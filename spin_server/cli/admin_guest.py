"""The admin API as a guest of the server: the glue between the two."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from prometheus_client import REGISTRY

from spin_server.admin.access import authenticate
from spin_server.admin.administration import Administration
from spin_server.admin.engine_link import CanaryRow, Figures, RankReport
from spin_server.admin.errors import UnauthorizedError
from spin_server.admin.server import AdminServer, check_admin
from spin_server.cli.admin_arguments import AdminArguments
from spin_server.engine.spin.control import EngineControl
from spin_server.engine.tenancy.callers import Caller, UnknownCallerError
from spin_server.engine.tenancy.limits import Limits
from spin_server.policy.policy import Policy


class ControlLink:
    """`EngineLink` over the engine's own control."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self.first_row, self.capacity = control.first_row, control.capacity
        self.reserved = control.reserved

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

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, CanaryRow]) -> None:
        """See `EngineLink`."""
        self._control.name_rows(rows, canaries)


_NO_LIMITS = Limits()


class KeyRing:
    """`Authenticator` over the admin API's keys.

    Args:
        administration: who knows them.
    """

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def configured(self) -> bool:
        """See `Authenticator`."""
        return bool(self._administration.state.tenants)

    def caller(self, authorization: str | None) -> Caller:
        """See `Authenticator`."""
        found = self._administration
        state = found.state
        try:
            name = authenticate(state, authorization, found.clock()).tenant
            tenant = None if name is None else state.tenant(name)
            limits = Limits() if tenant is None else Limits(**dict(tenant.limits))
            since = "" if tenant is None else tenant.created_at
            return Caller(name, None if limits == _NO_LIMITS else limits, since)
        except UnauthorizedError as error:
            raise UnknownCallerError(str(error)) from None


class AdminGuest:
    """Runs the admin API beside a server.

    Args:
        arguments: the admin API's.
        launch: the default policy that the server is started with.

    Raises:
        SpinError: what would stop it later, once the engine has loaded.
    """

    def __init__(self, arguments: AdminArguments, launch: Policy) -> None:
        self._arguments, self._launch = arguments, launch
        self.port = arguments.port
        check_admin(arguments.store, arguments.host, arguments.port)

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
            control.ask(KeyRing(server.administration))
            told = [f"spin-server: {line}" for line in server.announcement]
            print("", *told, sep="\n", flush=True)
            yield
        finally:
            await server.stop()
