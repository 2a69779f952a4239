"""Who is asking, from the door of the server to the engine's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from spin_server.engine.tenancy.limits import Limits
from spin_server.errors import SpinError


class UnknownCallerError(SpinError):
    """A request whose key is missing, unknown or over."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Args:
        tenant: whose policy and prefixes are his; None: the default policy's.
        limits: the tenant's.
        since: when the tenant was made; one that is made anew under the name is another.
    """

    tenant: str | None
    limits: Limits | None = None
    since: str = ""


class Authenticator(Protocol):
    """Knows the keys."""

    def configured(self) -> bool:
        """Whether there are tenants: then every request needs a key."""
        ...

    def caller(self, authorization: str | None) -> Caller:
        """Find a caller by his `Authorization` header.

        Raises:
            UnknownCallerError: the reason, in words that may be shown to him.
        """
        ...


@dataclass(slots=True, eq=False)
class Visit:
    """One HTTP request, from the door until its answer is written or its client is gone.

    Args:
        authorization: its header.
        caller: who it was when it was last asked; None: nobody was asked.
        admitted: whether the engine was given something of it; it then goes on to its end.
        refusal: why the engine was not given something of it.
        row: of the policy that something of it runs with.
    """

    authorization: str | None = None
    caller: Caller | None = None
    admitted: bool = False
    refusal: Exception | None = None
    row: int | None = None
    _at_end: list[Callable[[], object]] = field(default_factory=list)

    def at_end(self, run: Callable[[], object]) -> None:
        """Run something once it is over."""
        self._at_end.append(run)

    def end(self) -> None:
        """Say that it is over."""
        for run in self._at_end:
            run()
        self._at_end.clear()


_VISIT: ContextVar[Visit | None] = ContextVar("spin_visit", default=None)


@contextmanager
def visiting(visit: Visit) -> Iterator[None]:
    """Serve one: everything that is started within belongs to it."""
    token = _VISIT.set(visit)
    try:
        yield
    finally:
        _VISIT.reset(token)


def current_visit() -> Visit | None:
    """Say which request is being served; None: none that came by the door."""
    return _VISIT.get()
