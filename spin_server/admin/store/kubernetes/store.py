"""Documents in a ConfigMap and a Secret, for any number of servers and without a leader."""

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spin_server.admin.store.interface import (
    Change,
    Commit,
    Entry,
    ForgottenError,
    Snapshot,
    StaleError,
    StoreError,
    UnknownOutcomeError,
)
from spin_server.admin.store.kubernetes.layout import (
    Head,
    Keyring,
    Logged,
    Pending,
    after,
    commits,
    read_head,
    read_keyring,
    settled,
    snapshot,
    write_head,
    write_keyring,
)
from spin_server.admin.store.kubernetes.objects import (
    BusyError,
    ChangedError,
    Cluster,
    ObjectKind,
    RejectedError,
    Stored,
    UnansweredError,
)

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 60  # then everything is read again, in case an event was lost
_TRIES, _BLIPS = 10, 3
_COMMIT_SECONDS = 20.0  # and one request more, at most
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.5, 30.0
_KINDS: tuple[ObjectKind, ...] = ("config_map", "secret")


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two objects, read so that they belong together.

    Args:
        pending: whether the Secret holds a commit that was not made, and still might be.
        ring: settled.
    """

    config_map: Stored
    secret: Stored
    head: Head
    ring: Keyring
    pending: bool


class KubernetesStore:
    """See `Store`. Reads come from memory, which a watch keeps up to date.

    Args:
        cluster: where the objects are; they are made if they do not exist.

    Raises:
        StoreError: they cannot be read, or are none of ours.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._writing = threading.Lock()  # held over requests
        self._lock = threading.Lock()
        self._trouble: StoreError | None = None
        self._closed, self._again = threading.Event(), threading.Event()
        for kind in _KINDS:
            if cluster.get(kind) is None:
                cluster.create(kind)
        self._pair = self._read()
        self._thread = threading.Thread(target=self._follow, name="admin-store-watch", daemon=True)
        self._thread.start()

    @property
    def secret(self) -> str:
        """Which Secret it keeps keys in."""
        return self._cluster.shown("secret")

    def secret_entries(self) -> list[str]:
        """Get the names of what the Secret holds, as last read."""
        return list(self._good().secret.data)

    # Reading

    def _read(self, end: float | None = None) -> _Pair:
        """Read both objects; somebody may write between the two.

        Args:
            end: try again no later than that, in seconds of the monotonic clock.
        """
        for attempt in range(_TRIES):
            if attempt:
                self._closed.wait(0.02 * attempt)
            try:
                config_map, secret = (self._found(kind) for kind in _KINDS)
            except (UnansweredError, BusyError):
                if attempt < _BLIPS and not self._is_over(end):
                    continue
                raise
            head, ring = read_head(config_map.data), read_keyring(secret.data)
            done = settled(ring, head)
            if done is not None:
                pending = ring.pending is not None and ring.pending.id != head.keys
                return _Pair(config_map, secret, head, done, pending)
        raise StoreError(
            f"{self._cluster.shown('config_map')} and the Secret of that name do not belong "
            f"together: expected the keys of commit {head.keys or 'none'}, got {ring.commit}"
        )

    def _is_over(self, end: float | None) -> bool:
        return self._closed.is_set() or (end is not None and time.monotonic() > end)

    def _found(self, kind: ObjectKind) -> Stored:
        found = self._cluster.get(kind)
        if found is None:
            raise StoreError(f"expected {self._cluster.shown(kind)}, got none: it was deleted")
        return found

    def _read_on(self, end: float | None = None) -> _Pair:
        """Read both objects, as `_read`; what does not follow what was held is refused."""
        pair, held = self._read(end), self._pair.head
        if not _follows(pair.head, held):
            raise StoreError(
                f"{self._cluster.shown('config_map')} was put back: expected what follows "
                f"revision {held.revision}, got another revision {pair.head.revision}; restart "
                "the servers to go on from there"
            )
        return pair

    def _refresh(self) -> None:
        """Take over what the API server has; `_writing` is held."""
        try:
            self._hold(self._read_on())
        except StoreError as error:
            self._note(error)
            raise

    def _hold(self, pair: _Pair) -> None:
        with self._lock:
            self._pair, self._trouble = pair, None

    def _note(self, error: StoreError) -> None:
        with self._lock:
            self._trouble = error

    def _good(self) -> _Pair:
        with self._lock:
            if self._closed.is_set():
                raise StoreError(f"{self._cluster.shown('config_map')}: the store is closed")
            if self._trouble is not None:
                raise StoreError(str(self._trouble))
            return self._pair

    def revision(self) -> int:
        """See `Store`."""
        return self._good().head.revision

    def snapshot(self) -> Snapshot:
        """See `Store`."""
        pair = self._good()
        return snapshot(pair.head, pair.ring)

    def log(self, *, before: int | None, limit: int) -> list[Commit]:
        """See `Store`."""
        pair = self._good()
        found = [c for c in commits(pair.head, pair.ring) if before is None or c.revision < before]
        return found[::-1][:limit]

    def since(self, revision: int) -> list[Commit]:
        """See `Store`."""
        pair = self._good()
        known = commits(pair.head, pair.ring)
        oldest = pair.head.revision - len(known)
        if revision < oldest:
            raise ForgottenError(
                f"the log on Kubernetes is bounded: expected revision {oldest} or later, got "
                f"{revision}"
            )
        return [commit for commit in known if commit.revision > revision]

    # Watching

    def _follow(self) -> None:
        """Take over every change, and read everything again now and then."""
        pause = _LEAST_PAUSE_SECONDS
        while not self._closed.is_set():
            begun, trouble = time.monotonic(), "the watch ended at once"
            try:
                with self._writing:
                    self._refresh()
                for version in self._cluster.changes(_WATCH_SECONDS):
                    with self._writing:
                        if version != self._pair.config_map.version:
                            self._refresh()
                    if self._closed.is_set():
                        return
            except Exception as error:  # the next try may succeed
                trouble = str(error)
            if self._again.is_set():
                self._again.clear()
            elif time.monotonic() - begun > _WATCH_SECONDS / 2:
                pause = _LEAST_PAUSE_SECONDS
            elif not self._closed.is_set():
                logger.warning("admin store: %s; trying again", trouble)
                self._closed.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    def _read_again(self) -> None:
        """Let the watch end, so that everything is read again at once."""
        self._again.set()
        self._cluster.close()

    # Writing

    def commit(self, base: int, changes: Sequence[Change], entry: Entry) -> int:
        """See `Store`."""
        with self._writing:
            try:
                return self._commit(base, changes, entry)
            finally:
                if self._trouble is not None:
                    self._read_again()

    def _commit(self, base: int, changes: Sequence[Change], entry: Entry) -> int:
        pair = self._good()
        if pair.head.revision != base:
            raise StaleError(
                f"expected revision {base}, got {pair.head.revision}: somebody else wrote"
            )
        identity = secrets.token_hex(8)
        try:
            self._hold(self._write(pair, identity, changes, entry))
        except ChangedError as error:
            self._refresh()
            # A proxy may have sent it twice: then it is its own conflict.
            if not _knows(self._pair.head, identity):
                raise StaleError(f"expected revision {base}, got a later one: {error}") from error
        except RejectedError:
            self._refresh()  # the Secret may hold what is pending
            raise
        except UnansweredError as error:
            if not self._was_made(identity, base, error):
                raise
        return base + 1

    def _write(self, pair: _Pair, identity: str, changes: Sequence[Change], entry: Entry) -> _Pair:
        revision = pair.head.revision + 1
        of_keys = tuple(change for change in changes if change.ref.kind == "key")
        others = tuple(change for change in changes if change.ref.kind != "key")
        head = Head(
            revision,
            identity,
            identity if of_keys else pair.head.keys,
            after(pair.head.documents, revision, others),
            (
                *pair.head.log,
                Logged(identity, Commit(revision, entry, others), keyed=bool(of_keys)),
            ),
        )
        data, head = write_head(head)
        if of_keys:
            if pair.pending:
                # Whoever left that may still be about to commit it; after this he cannot.
                pair = self._fence(pair)
            wanted = {change.ref: change.after for change in of_keys}
            ring = replace(pair.ring, pending=Pending(identity, revision, wanted))
            kept, ring = write_keyring(ring, pair.secret.data)
            secret = self._cluster.replace("secret", pair.secret, kept)
            done = settled(ring, head)
            assert done is not None
            pair = replace(pair, secret=secret, ring=done, pending=False)
        config_map = self._cluster.replace("config_map", pair.config_map, data)
        return replace(pair, config_map=config_map, head=head)

    def _fence(self, pair: _Pair) -> _Pair:
        """Write the ConfigMap as it is, so that nobody can commit on what he read before."""
        data = dict(pair.config_map.data) or write_head(pair.head)[0]
        # Never the same twice: writing what is there already changes no version.
        data["fence"] = secrets.token_hex(8).encode()
        return replace(pair, config_map=self._cluster.replace("config_map", pair.config_map, data))

    def _was_made(self, identity: str, base: int, error: StoreError) -> bool:
        """Find out whether a commit was made that nobody answered for; it cannot be later.

        Raises:
            UnknownOutcomeError: nobody answers this either.
        """
        end, pause = time.monotonic() + _COMMIT_SECONDS, 0.0
        while not self._is_over(end):
            self._closed.wait(pause)
            pause = min(0.05 + 2 * pause, 2.0)
            try:
                pair = self._read_on(end)
                if _knows(pair.head, identity):
                    self._hold(pair)
                    return True
                if not _reaches(pair.head, base + 1):
                    break
                self._hold(self._fence(pair))
                return False
            except StoreError:
                continue
        trouble = UnknownOutcomeError(f"it is not known whether it was written: {error}")
        self._note(trouble)
        raise trouble from error

    def probe(self) -> None:
        """See `Store`."""
        with self._writing:
            try:
                self._hold(self._fence(self._good()))
            except ChangedError:
                self._refresh()
                raise

    def edit_secret(self, edit: Callable[[dict[str, bytes]], None]) -> None:
        """Change what the Secret holds beside the keys.

        Args:
            edit: may be done more than once.

        Raises:
            StoreError: it cannot be written.
        """
        with self._writing:
            for attempt in range(_TRIES):
                try:
                    data = dict((secret := self._found("secret")).data)
                    edit(data)
                    self._cluster.replace("secret", secret, data)
                except (ChangedError, UnansweredError, BusyError):
                    if attempt == _TRIES - 1 or self._closed.wait(0.05 * attempt):
                        raise
                    continue
                self._refresh()
                return

    def close(self) -> None:
        """See `Store`."""
        self._closed.set()
        self._cluster.close()
        self._thread.join(timeout=1)


def _knows(head: Head, identity: str) -> bool:
    """Say whether a commit was made, as far as the log goes back."""
    return any(logged.id == identity for logged in head.log)


def _reaches(head: Head, revision: int) -> bool:
    """Say whether the log would hold a revision, if it was made."""
    if head.revision < revision:
        return True
    return bool(head.log) and head.log[0].commit.revision <= revision


def _follows(head: Head, before: Head) -> bool:
    """Say whether a head comes after another, or is it, as far as the log goes back."""
    if head.revision == before.revision:
        return head.commit == before.commit
    if head.revision < before.revision:
        return False
    if before.revision == 0 or not _reaches(head, before.revision):
        return True
    return _knows(head, before.commit)
