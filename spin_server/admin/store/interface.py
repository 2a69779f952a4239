"""What the admin layer asks of a store.

A store holds documents and the log of their changes. A commit is atomic: it changes some documents,
makes the next revision, and logs who did it and why. It is refused if the store is no longer at the
revision that the writer saw, so nobody overwrites what he has not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from spin_server.errors import SpinError

Kind = Literal["policy", "tenant", "key"]
Body = dict[str, Any]  # a JSON object


class StoreError(SpinError):
    """The store cannot be read or written, with the reason."""


class ForgottenError(StoreError):
    """The log does not go back that far."""


class UnknownOutcomeError(StoreError):
    """Nobody could say whether a commit was made; the newest revision will."""


class StaleError(SpinError):
    """Somebody else committed first; nothing was written."""


class Ref(NamedTuple):
    """Names a document."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored.

    Args:
        revision: of the commit that wrote it last.
        body: its contents; not to be changed in place.
    """

    revision: int
    body: Body


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does to one document; None stands for no document."""

    ref: Ref
    before: Body | None
    after: Body | None


@dataclass(frozen=True, slots=True)
class Entry:
    """Who commits, and why.

    Args:
        at: time, ISO 8601 in UTC.
        actor: id of the key that was used, or a name in brackets for the server itself.
        action: what was asked for, such as `PATCH /v1/policies/default`.
        reason: what the caller gave as one; may be empty.
        request_id: of the HTTP request; may be empty.
    """

    at: str
    actor: str
    action: str
    reason: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """A logged commit."""

    revision: int
    entry: Entry
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All documents at one revision; revision 0 is an empty store."""

    revision: int
    documents: Mapping[Ref, Document]


class Store(Protocol):
    """Keeps documents. Calls block, may come from any thread, and raise `StoreError`."""

    def revision(self) -> int:
        """Get the newest revision; cheap."""
        ...

    def snapshot(self) -> Snapshot:
        """Read all documents at the newest revision."""
        ...

    def commit(self, base: int, changes: Sequence[Change], entry: Entry) -> int:
        """Write a commit on top of revision `base`; once this returns, it is kept.

        Returns:
            The new revision.

        Raises:
            StaleError: the store is at another revision.
            UnknownOutcomeError: it may or may not have been written; otherwise an error means that
                nothing was, and nothing will be.
        """
        ...

    def probe(self) -> None:
        """Find out whether it can be written, by a write that changes nothing.

        Raises:
            StoreError: it cannot.
        """
        ...

    def log(self, *, before: int | None, limit: int) -> list[Commit]:
        """Read commits, newest first, of revisions below `before`."""
        ...

    def since(self, revision: int) -> list[Commit]:
        """Read the commits after a revision, oldest first.

        Raises:
            ForgottenError: the log does not go back that far.
        """
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
