"""Who is asking, from the door of the server to the engine's."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    """

    tenant: str | None
    limits: Limits | None = None


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


_CALLER: ContextVar[Caller | None] = ContextVar("spin_caller", default=None)


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Serve a request of his: everything that is started within belongs to it."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


def current_caller() -> Caller | None:
    """Say whose request is being served; None: nobody was asked for a key."""
    return _CALLER.get()
