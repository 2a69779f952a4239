"""What the ConfigMap and the Secret hold, so that a commit to both takes effect at one moment.

Writing the ConfigMap is the commit. It holds the revision, policies and tenants in plain JSON, the
log, and the id of the last commit that changed keys. The Secret holds the keys as of one commit,
and the changes of at most one more, pending: they count once the ConfigMap names that commit.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from spin_server.admin.store.interface import (
    Body,
    Change,
    Commit,
    Document,
    Entry,
    Ref,
    Snapshot,
    StoreError,
)

_FORMAT = "1"
# An object takes 1,048,576 bytes. What only removes keys may use the rest: a Secret that is full
# can still be emptied.
_MOST_BYTES, _MOST_BYTES_TO_REMOVE = 900_000, 1_040_000
_MOST_LOG_BYTES = 250_000  # of the ConfigMap's
_KEYRING = "keyring"
_T = TypeVar("_T")
_HEAD = ("format", "revision", "commit", "keys", "digest", "log", "fence")


@dataclass(frozen=True, slots=True)
class Logged:
    """A commit as the ConfigMap logs it.

    Args:
        id: of the commit.
        commit: with the changes of all documents but keys.
        keyed: whether it changed keys too.
    """

    id: str
    commit: Commit
    keyed: bool


@dataclass(frozen=True, slots=True)
class Head:
    """What the ConfigMap says.

    Args:
        revision: the newest.
        commit: id of the commit that made it.
        keys: id of the last commit that changed keys.
        documents: all but keys.
        log: newest last, as far back as there is room.
    """

    revision: int = 0
    commit: str = ""
    keys: str = ""
    documents: Mapping[Ref, Document] = field(default_factory=dict)
    log: tuple[Logged, ...] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """What a commit that may not have been made does to keys; None removes one."""

    id: str
    revision: int
    after: Mapping[Ref, Body | None]


@dataclass(frozen=True, slots=True)
class Keyring:
    """What the Secret says.

    Args:
        commit: id of the commit that its documents are as of.
        documents: keys.
        log: revisions, newest last, and what they changed of keys.
        pending: one more commit, made or not.
    """

    commit: str = ""
    documents: Mapping[Ref, Document] = field(default_factory=dict)
    log: tuple[tuple[int, tuple[Change, ...]], ...] = ()
    pending: Pending | None = None


def settled(ring: Keyring, head: Head) -> Keyring | None:
    """Fold what is pending in if it counts, or drop it; None: the two do not belong together."""
    if ring.commit == head.keys:
        return replace(ring, pending=None)
    if ring.pending is None or ring.pending.id != head.keys:
        return None
    pending, known = ring.pending, ring.documents
    changes = tuple(
        Change(ref, known[ref].body if ref in known else None, body)
        for ref, body in pending.after.items()
    )
    return Keyring(
        pending.id,
        after(known, pending.revision, changes),
        (*ring.log, (pending.revision, changes)),
    )


def after(
    documents: Mapping[Ref, Document], revision: int, changes: Iterable[Change]
) -> dict[Ref, Document]:
    """Get the documents that changes make."""
    found = dict(documents)
    for change in changes:
        found.pop(change.ref, None)
        if change.after is not None:
            found[change.ref] = Document(revision, change.after)
    return found


def snapshot(head: Head, ring: Keyring) -> Snapshot:
    """Put all documents together; the keyring is settled."""
    return Snapshot(head.revision, {**head.documents, **ring.documents})


def commits(head: Head, ring: Keyring) -> list[Commit]:
    """Put the log together, oldest first; it begins where nothing is missing any more."""
    of_keys, found = dict(ring.log), []
    for logged in reversed(head.log):
        commit = logged.commit
        if logged.keyed:
            if commit.revision not in of_keys:
                break
            commit = replace(commit, changes=(*commit.changes, *of_keys[commit.revision]))
        found.append(commit)
    return found[::-1]


def write_head(head: Head) -> tuple[dict[str, bytes], Head]:
    """Write the ConfigMap's data; the oldest of the log goes when it is full.

    Returns:
        The data, and the head that it holds.

    Raises:
        StoreError: there is no room for the documents.
        ValueError: a number that JSON does not have.
    """
    lines = [_json(_logged(logged)) for logged in head.log]
    data = {f"{r.kind}.{r.name}": _json(_document(d)) for r, d in head.documents.items()}
    room = min(_MOST_LOG_BYTES, _MOST_BYTES - _size(data) - 1000)
    kept: list[bytes] = []
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0 and kept:
            break
        kept.append(line)
    data |= {
        "format": _FORMAT.encode(),
        "revision": str(head.revision).encode(),
        "commit": head.commit.encode(),
        "keys": head.keys.encode(),
        "digest": _digest(head),
        "log": b"\n".join(reversed(kept)),
    }
    if _size(data) > _MOST_BYTES:
        raise StoreError(
            f"the ConfigMap is full: expected at most {_MOST_BYTES:,} bytes of policies and "
            f"tenants, got {_size(data):,}"
        )
    return data, replace(head, log=head.log[len(head.log) - len(kept) :])


def read_head(data: Mapping[str, bytes]) -> Head:
    """Read the ConfigMap's data; none stands for an empty store.

    Raises:
        StoreError: it is not what this release writes.
    """
    return _read("the ConfigMap", lambda: _read_head(data)) if data else Head()


def _read_head(data: Mapping[str, bytes]) -> Head:
    _check_format(data["format"].decode())
    documents = {}
    for name, text in data.items():
        if name not in _HEAD:
            kind, _, rest = name.partition(".")
            documents[Ref(kind, rest)] = _read(  # type: ignore[arg-type]
                f"{kind} {rest} in the ConfigMap", partial(_read_document, text)
            )
    head = Head(
        int(data["revision"]),
        data["commit"].decode(),
        data["keys"].decode(),
        documents,
        tuple(_read_logged(json.loads(line)) for line in data["log"].splitlines()),
    )
    if data["digest"] != _digest(head):
        raise StoreError(
            f"the ConfigMap was changed by hand: its documents are not those of revision "
            f"{head.revision}; put them back, and change them through the admin API"
        )
    return head


def write_keyring(ring: Keyring, beside: Mapping[str, bytes]) -> tuple[dict[str, bytes], Keyring]:
    """Write the Secret's data; the oldest of the log goes when it is full.

    Args:
        beside: the data there is; what is not ours stays.

    Returns:
        The data, and the keyring that it holds.

    Raises:
        StoreError: there is no room for the keys.
        ValueError: a number that JSON does not have.
    """
    others = {name: value for name, value in beside.items() if name != _KEYRING}
    adds = ring.pending is not None and any(ring.pending.after.values())
    most = _MOST_BYTES if adds else _MOST_BYTES_TO_REMOVE
    while True:
        # Ten thousand keys would not fit as they are.
        packed = zlib.compress(_json(_keyring(ring)), 6)
        data = {**others, _KEYRING: packed}
        if _size(data) <= most:
            return data, ring
        if not ring.log:
            raise StoreError(
                f"the Secret is full: expected at most {most:,} bytes of keys, got "
                f"{_size(data):,}; revoke some"
            )
        ring = replace(ring, log=ring.log[(len(ring.log) + 1) // 2 :])


def read_keyring(data: Mapping[str, bytes]) -> Keyring:
    """Read the Secret's data; none of ours stands for no keys.

    Raises:
        StoreError: it is not what this release writes.
    """
    if _KEYRING not in data:
        return Keyring()
    return _read("the Secret", lambda: _read_keyring(json.loads(zlib.decompress(data[_KEYRING]))))


def _read_keyring(found: Body) -> Keyring:
    _check_format(found["format"])
    pending = found["pending"]
    return Keyring(
        found["commit"],
        {
            Ref("key", name): Document(document["revision"], document["body"])
            for name, document in found["documents"].items()
        },
        tuple((revision, _read_changes(changes)) for revision, changes in found["log"]),
        pending
        and Pending(
            pending["id"],
            pending["revision"],
            {Ref("key", name): body for name, body in pending["after"].items()},
        ),
    )


def _keyring(ring: Keyring) -> Body:
    pending = ring.pending
    return {
        "format": _FORMAT,
        "commit": ring.commit,
        "documents": {ref.name: _document(d) for ref, d in ring.documents.items()},
        "log": [[revision, _changes(changes)] for revision, changes in ring.log],
        "pending": pending
        and {
            "id": pending.id,
            "revision": pending.revision,
            "after": {ref.name: body for ref, body in pending.after.items()},
        },
    }


def _logged(logged: Logged) -> Body:
    return {
        "id": logged.id,
        "revision": logged.commit.revision,
        "keyed": logged.keyed,
        **asdict(logged.commit.entry),
        "changes": _changes(logged.commit.changes),
    }


def _read_logged(found: Body) -> Logged:
    changes, keyed = _read_changes(found.pop("changes")), found.pop("keyed")
    identity, revision = found.pop("id"), found.pop("revision")
    return Logged(identity, Commit(revision, Entry(**found), changes), keyed)


def _changes(changes: Sequence[Change]) -> list[Any]:
    return [[*change.ref, change.before, change.after] for change in changes]


def _read_changes(found: Iterable[Any]) -> tuple[Change, ...]:
    return tuple(Change(Ref(kind, name), before, then) for kind, name, before, then in found)


def _document(document: Document) -> Body:
    return {"revision": document.revision, "body": document.body}


def _digest(head: Head) -> bytes:
    """Hash the documents, so that a change by hand shows."""
    documents = [[*ref, _document(d)] for ref, d in sorted(head.documents.items())]
    return hashlib.sha256(_json([head.revision, documents])).hexdigest().encode()


def _read_document(text: bytes) -> Document:
    found = json.loads(text)
    return Document(found["revision"], found["body"])


def _check_format(found: str) -> None:
    if found != _FORMAT:
        raise StoreError(f"expected a store of format {_FORMAT}, got format {found}")


def _read(what: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        zlib.error,
    ) as error:
        raise StoreError(
            f"expected {what} as this release writes it, got {type(error).__name__}: {error}"
        ) from error


def _size(data: Mapping[str, bytes]) -> int:
    return sum(len(name) + len(value) for name, value in data.items())


def _json(value: Any) -> bytes:
    return json.dumps(
        value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":")
    ).encode()
