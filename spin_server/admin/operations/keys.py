"""What can be done to keys."""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from spin_server.admin.documents import (
    KeyDocument,
    Scope,
    moment,
    timestamp,
)
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
)
from spin_server.admin.operations.base import Operation, dump, edit, require_match
from spin_server.admin.state import State
from spin_server.admin.store.interface import Change, Ref

SECRET_BYTES = 32
MOST_KEYS = 100_000
_PREFIX = "spin_"
_SHOWN_CHARACTERS = len(_PREFIX) + 6
_LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was made; the only place where the key itself is.

    Args:
        key_id: names its document.
        secret: the key.
    """

    key_id: str
    secret: str

    @classmethod
    def draw(cls) -> "NewKey":
        """Draw one from the system's randomness."""
        return cls(f"key-{secrets.token_hex(8)}", _PREFIX + secrets.token_urlsafe(SECRET_BYTES))

    def document(
        self,
        *,
        tenant: str | None,
        scopes: Iterable[Scope],
        description: str,
        now: datetime,
        expires_at: datetime | None,
    ) -> KeyDocument:
        """Make the document that stands for it."""
        return KeyDocument(
            sha256=hash_key(self.secret),
            prefix=self.secret[:_SHOWN_CHARACTERS],
            tenant=tenant,
            scopes=sorted(set(scopes)),
            description=description,
            created_at=timestamp(now),
            expires_at=None if expires_at is None else timestamp(expires_at),
        )


def hash_key(secret: str) -> str:
    """Hash a key. It has 256 random bits, so a slow hash would protect nothing more."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(key: NewKey, document: KeyDocument, *, now: datetime) -> Operation:
    """Add a key."""

    def operate(state: State) -> list[Change]:
        if document.tenant is not None and state.tenant(document.tenant) is None:
            raise NotFoundError(f"no tenant {document.tenant!r}")
        if document.expires_at is not None and moment(document.expires_at) <= now:
            raise InvalidError(f"expires_at: expected a time to come, got {document.expires_at}")
        if len(state.keys) >= MOST_KEYS:
            raise ConflictError(f"keys: expected at most {MOST_KEYS:,}")
        return edit(state, Ref("key", key.key_id), dump(document))

    return operate


def revoke_key(key_id: str, if_match: str | None) -> Operation:
    """Delete a key; it is refused from now on."""

    def operate(state: State) -> list[Change]:
        if state.key(key_id) is None:
            raise NotFoundError(f"no key {key_id!r}")
        require_match(state, Ref("key", key_id), if_match)
        return edit(state, Ref("key", key_id), None)

    return operate


def rotate_key(
    key_id: str, successor: NewKey, overlap_seconds: int, if_match: str | None, *, now: datetime
) -> Operation:
    """Add a key like another, which is refused once the overlap is over."""

    def operate(state: State) -> list[Change]:
        if (key := state.key(key_id)) is None:
            raise NotFoundError(f"no key {key_id!r}")
        ref = Ref("key", key_id)
        require_match(state, ref, if_match)
        if key.replaced_by is not None:
            raise ConflictError(f"key {key_id!r} was replaced by {key.replaced_by!r}")
        end, lifetime = now + timedelta(seconds=overlap_seconds), None
        if key.expires_at is not None:
            if key.ended(now):
                raise ConflictError(f"key {key_id!r} has expired; make a new one")
            end = min(end, moment(key.expires_at))
            # The successor lives as long as its predecessor was made to live.
            lived = moment(key.expires_at) - moment(key.created_at)
            lifetime = now + min(lived, _LATEST - now)
        added = successor.document(
            tenant=key.tenant,
            scopes=key.scopes,
            description=key.description,
            now=now,
            expires_at=lifetime,
        )
        retired = key.model_copy(
            update={"expires_at": timestamp(end), "replaced_by": successor.key_id}
        )
        return [
            *edit(state, ref, dump(retired)),
            *edit(state, Ref("key", successor.key_id), dump(added)),
        ]

    return operate
