"""The one writer of the store: tries operations on the newest state, and commits them."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from spin_server.admin.documents import Fields, KeyDocument, fields_of, timestamp
from spin_server.admin.errors import ConflictError, NotFoundError, UnavailableError
from spin_server.admin.first_key import FirstKeyPlace
from spin_server.admin.operations import NewKey, Operation, bodies_at, create_key, expire_policies
from spin_server.admin.state import State
from spin_server.admin.store.interface import (
    Body,
    Change,
    Commit,
    Entry,
    ForgottenError,
    Ref,
    Snapshot,
    StaleError,
    Store,
    StoreError,
    UnknownOutcomeError,
)
from spin_server.policy.policy import Policy

logger = logging.getLogger(__name__)

_ATTEMPTS = 50
_ITSELF = "[server]"


@dataclass(frozen=True, slots=True)
class Author:
    """Who asks for a change.

    Args:
        actor: id of his key.
        action: what he asked for.
        reason: why, in his words.
        request_id: of his HTTP request.
    """

    actor: str
    action: str
    reason: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation did, or would do.

    Args:
        before: what it was based on.
        state: after it.
        changes: none, if everything was as asked for.
    """

    before: State
    state: State
    changes: tuple[Change, ...]


def _tell(revision: int, entry: Entry, changes: Sequence[Change], doubt: str = "") -> None:
    """Log a commit, without what is in it: a store's own log may be bounded."""
    changed = ["/".join(change.ref) for change in changes]
    told = {"revision": revision, **asdict(entry), "changed": changed}
    if doubt:
        told["doubt"] = doubt
    logger.info("admin audit: %s", json.dumps(told, ensure_ascii=False))


def _now() -> datetime:
    return datetime.now(UTC)


class Administration:
    """The documents, in memory and in the store.

    Args:
        store: where they are kept.
        launch: the default policy that the server was started with.
        clock: tells the time, with its zone.

    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(
        self, store: Store, launch: Policy, *, clock: Callable[[], datetime] = _now
    ) -> None:
        self.store, self.clock = store, clock
        self._launch: Fields = fields_of(launch)
        self._writing = threading.RLock()  # held while a commit waits for other processes
        self._lock = threading.Lock()  # held for a look at the store, never over a commit
        self._state = State.of(store.snapshot(), self._launch)
        self._unread: str | None = None  # why the state may be old
        self._unwritten: str | None = None  # why nothing can be written, as of the last try
        self._put_back: str | None = None  # once it was, nothing of it is believed

    @property
    def state(self) -> State:
        """The newest state that this process knows."""
        return self._state

    @property
    def in_force(self) -> State:
        """The same without what was set until a time that has passed.

        The commit that ends a time limit may be late; the engine never waits for it.
        """
        return self._state.at(self.clock())

    @property
    def trouble(self) -> str | None:
        """Why the state may be old, or why nothing can be written."""
        return self._unread or self._unwritten

    def refresh(self) -> State:
        """Take over what others wrote; bad documents keep the last good state, and say so."""
        with self._lock:
            try:
                if self._put_back is not None:
                    raise StoreError(self._put_back)
                if self.store.revision() != self._state.revision:
                    self._take(self.store.snapshot())
                trouble = None
            except StoreError as error:
                trouble = str(error)
            if trouble is not None and trouble != self._unread:
                logger.error("admin store: %s; revision %d stays", trouble, self._state.revision)
            self._unread = trouble
            return self._state

    def _take(self, snapshot: Snapshot) -> None:
        if snapshot.revision < self._state.revision:
            # Going on from there would give two histories the same revisions.
            self._put_back = (
                f"the store was put back: expected revision {self._state.revision} or later, got "
                f"{snapshot.revision}; restart the servers to go on from there"
            )
            raise StoreError(self._put_back)
        self._state = State.of(snapshot, self._launch)

    def _refreshed(self) -> State:
        """Take over what others wrote.

        Raises:
            UnavailableError: the state may be old.
        """
        state = self.refresh()
        if self._unread is not None:
            raise UnavailableError(f"the store does not answer: {self._unread}")
        return state

    def perform(self, operation: Operation, author: Author, *, dry_run: bool = False) -> Outcome:
        """Commit an operation, on top of whatever others wrote meanwhile.

        Raises:
            RefusedError: the operation cannot be done, or the store does not answer.
        """
        if dry_run:
            return self._tried(operation)
        with self._writing:
            for _ in range(_ATTEMPTS):
                outcome = self._tried(operation)
                if not outcome.changes:
                    return outcome
                if self._commit(outcome, self._entry(author)):
                    return outcome
        raise ConflictError("others wrote again and again meanwhile; nothing was written")

    def _tried(self, operation: Operation) -> Outcome:
        state = self._refreshed()
        changes = tuple(operation(state))
        return Outcome(state, state.after(changes) if changes else state, changes)

    def _commit(self, outcome: Outcome, entry: Entry) -> bool:
        """Write what was tried; say whether nobody else wrote first."""
        revision = outcome.state.revision
        try:
            self.store.commit(outcome.before.revision, outcome.changes, entry)
        except StaleError:
            return False
        except UnknownOutcomeError as error:
            _tell(revision, entry, outcome.changes, doubt=str(error))
            raise UnavailableError(str(error)) from error
        except StoreError as error:
            self._note_unwritten(str(error))
            raise UnavailableError(f"nothing was written: {error}") from error
        self._note_unwritten(None)
        with self._lock:
            if revision > self._state.revision:  # else somebody wrote even more, and it was taken
                self._state = outcome.state
        _tell(revision, entry, outcome.changes)
        return True

    def _note_unwritten(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._unwritten:
            logger.error("admin store: it cannot be written: %s", trouble)
        self._unwritten = trouble

    def _entry(self, author: Author) -> Entry:
        return Entry(
            at=timestamp(self.clock()),
            actor=author.actor,
            action=author.action,
            reason=author.reason,
            request_id=author.request_id,
        )

    def expire(self) -> None:
        """Take back what was set for a while, once that while is over.

        Where nothing is to be taken back, and the last write failed, find out whether one could be
        made now.

        Raises:
            RefusedError: it cannot be written.
        """
        due, now = self._state.next_expiry, self.clock()
        if due is not None and due <= now:
            self.perform(expire_policies(now), Author(_ITSELF, "end of a time limit"))
        elif self._unwritten is not None:
            with self._writing:
                try:
                    self.store.probe()
                    self._note_unwritten(None)
                except StoreError as error:
                    self._note_unwritten(str(error))

    def bodies_at(self, revision: int) -> tuple[int, dict[Ref, Body]]:
        """Work out policies and tenants as they were.

        Returns:
            The revision they were worked out at, and the documents of `revision`.

        Raises:
            NotFoundError: no such revision.
            UnavailableError: nobody knows whether what is in memory is the newest.
        """
        state = self._refreshed()
        if not 0 <= revision <= state.revision:
            raise NotFoundError(f"revision {revision}: expected 0 to {state.revision}")
        # Without the lock: a long log takes seconds, and others may write meanwhile.
        later = [c for c in self.since(revision) if c.revision <= state.revision]
        return state.revision, bodies_at(state, later)

    def since(self, revision: int) -> list[Commit]:
        """Read the commits after a revision, oldest first."""
        try:
            return self.store.since(revision)
        except ForgottenError as error:
            raise NotFoundError(str(error)) from error
        except StoreError as error:
            raise UnavailableError(str(error)) from error

    def log(self, *, before: int | None, limit: int) -> list[Commit]:
        """Read commits, newest first."""
        try:
            return self.store.log(before=before, limit=limit)
        except StoreError as error:
            raise UnavailableError(str(error)) from error

    def bootstrap(self, place: FirstKeyPlace) -> bool:
        """Make the first key if nobody could make one: it may do everything.

        Args:
            place: where its owner finds it.

        Returns:
            Whether a key was made.

        Raises:
            StoreError: the key cannot be put there.
        """
        state = self.refresh()
        place.settle(lambda key_id: state.key(key_id) is not None)
        if self._somebody_can_make_keys(state):
            return False
        key, now = NewKey.draw(), self.clock()
        document = self._full_key(key, "made at the first start")

        def create(state: State) -> list[Change]:
            if self._somebody_can_make_keys(state):  # another replica was first
                return []
            return create_key(key, document, now=now)(state)

        # Put there first: a key that nobody can read would lock everybody out.
        place.put(key)
        try:
            made = bool(self.perform(create, Author(_ITSELF, "first start")).changes)
        except BaseException:
            place.withdraw(key)
            raise
        if made:
            place.show(key)
        else:
            place.withdraw(key)
        return made

    def recover_key(self) -> NewKey:
        """Make a key that may do everything, for whoever can write the store itself.

        Raises:
            RefusedError: the store does not take it.
        """
        key = NewKey.draw()
        document = self._full_key(key, "made beside the API: key recover")
        operation = create_key(key, document, now=self.clock())
        self.perform(operation, Author("[store]", "key recover"))
        return key

    def _full_key(self, key: NewKey, description: str) -> KeyDocument:
        return key.document(
            tenant=None,
            scopes=("read", "write", "keys", "audit"),
            description=description,
            now=self.clock(),
            expires_at=None,
        )

    def _somebody_can_make_keys(self, state: State) -> bool:
        return any(self._can_make_keys(state, key_id) for key_id in state.keys)

    def _can_make_keys(self, state: State, key_id: str) -> bool:
        key = state.key(key_id)
        if key is None or key.tenant is not None or "keys" not in key.scopes:
            return False
        return not key.ended(self.clock())
