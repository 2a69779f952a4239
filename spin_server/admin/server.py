"""The admin API's own listener, in the event loop of the process that serves.

It listens before the server is ready, and stops with it.
"""

import asyncio
import contextlib
import logging
import socket
from typing import Any

import uvicorn
from prometheus_client.registry import CollectorRegistry
from uvicorn.protocols.http.h11_impl import H11Protocol

from spin_server.admin.administration import Administration
from spin_server.admin.applier import Applier
from spin_server.admin.engine_link import EngineLink
from spin_server.admin.http.app import create_app
from spin_server.admin.http.context import Services
from spin_server.admin.location import is_loopback
from spin_server.admin.opening import open_store
from spin_server.errors import InputError, StartupError
from spin_server.policy.policy import Policy

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 5
_FIRST_APPLY_SECONDS = 60.0


class _Protocol(H11Protocol):
    """HTTP without a log of requests: their addresses may hold a key, or a reason that holds one.

    uvicorn's own switch is one for the whole process, and the server that we are a guest of turns
    it on.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.access_log = False


class _Server(uvicorn.Server):
    """Leaves the signals to the process that it is a guest of."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Capture none."""
        yield


def check_admin(store: str, host: str, port: int) -> None:
    """Find out early what would stop the admin API: an engine takes minutes to load.

    Raises:
        InputError: the address cannot be had, or the store is no place for one.
        StoreError: the store cannot be read.
    """
    _listen(host, port).close()
    opened, _ = open_store(store)
    try:
        Administration(opened, Policy())
    finally:
        opened.close()


class AdminServer:
    """The admin API of one serving process.

    Args:
        store: its file, or kubernetes://NAMESPACE/NAME.
        host, port: where to listen.
        launch: the default policy that the server was started with.
        link: to the engine.
        registry: metrics are added here.

    Raises:
        InputError: the address cannot be had.
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        store: str,
        host: str,
        port: int,
        launch: Policy,
        link: EngineLink,
        registry: CollectorRegistry,
    ) -> None:
        self._store, place = open_store(store)
        try:
            self._socket = _listen(host, port)
        except InputError:
            self._store.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self.administration = Administration(self._store, launch)
        is_new = self.administration.state.revision == 0
        made_key = self.administration.bootstrap(place)
        self.first_key = place.shown if made_key else None  # where it is, if one was made
        # What whoever starts it should know, line by line.
        self.announcement = [f"admin API at {self.url}"]
        if self.first_key is not None:
            self.announcement[0] += f"; its first key is in {self.first_key}"
        if is_new:
            self.announcement.append(
                f"{store} is a new store: it has no tenants, so the serving API needs no key"
            )
        if not is_loopback(host):
            self.announcement.append(
                f"the admin API speaks plain HTTP, and listens on {host}: whoever is on the way "
                "can read its keys, unless a proxy with TLS is in front"
            )
        self._applier = Applier(self.administration, link)
        services = Services(self.administration, self._applier, link)
        config = uvicorn.Config(
            create_app(services, registry),
            log_config=None,
            http=_Protocol,  # h11 bounds the headers
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        self._server = _Server(config)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, and bring the engine to the store's revision.

        Raises:
            StartupError: the engine does not take the policies.
        """
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._socket])),
            asyncio.create_task(self._applier.run()),
        ]
        revision = self.administration.state.revision
        if not await self._applier.reach(revision, _FIRST_APPLY_SECONDS):
            raise StartupError(
                f"admin: expected the engine to take revision {revision} of the stored policies, "
                f"got {self._applier.trouble or 'no answer'}"
            )

    async def stop(self) -> None:
        """Let open requests end, and let go of the store."""
        self._server.should_exit = True
        if self._tasks:
            serving, applying = self._tasks
            applying.cancel()
            await asyncio.gather(serving, applying, return_exceptions=True)
        self._socket.close()
        await asyncio.to_thread(self._store.close)


def _listen(host: str, port: int) -> socket.socket:
    """Take the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise InputError("--admin-port", "a free address", f"{host}:{port} ({error})") from None
    found.setblocking(False)
    return found
