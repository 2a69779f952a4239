"""What can be done to the documents: each makes the changes of one operation from a state.

An operation is a function of the state, so that it can be tried (dry run), tried again after
somebody else wrote first, and put beside others in one commit.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from spin_server.admin.documents import (
    DEFAULT,
    Canary,
    Expiry,
    Fields,
    KeyDocument,
    PolicyDocument,
    Scope,
    TenantDocument,
    moment,
    timestamp,
)
from spin_server.admin.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
    UnconditionalError,
)
from spin_server.admin.state import State
from spin_server.admin.store.interface import Body, Change, Commit, Ref

Operation = Callable[[State], list[Change]]
SECRET_BYTES = 32
_PREFIX = "spin_"
_SHOWN_CHARACTERS = len(_PREFIX) + 6
_LATEST = datetime.max.replace(tzinfo=UTC)
MOST_TENANTS, MOST_KEYS = 10_000, 100_000


def etag(revision: int) -> str:
    """Write a document's revision as a strong entity tag."""
    return f'"{revision}"'


def require_match(state: State, ref: Ref, if_match: str | None) -> None:
    """Refuse a write that is not based on the document's newest revision.

    Raises:
        UnconditionalError: `If-Match` is missing.
        PreconditionError: it names another revision.
    """
    current = etag(state.revision_of(ref))
    if if_match is None:
        raise UnconditionalError(
            f"{ref.kind} {ref.name}: expected If-Match, such as {current}, its ETag"
        )
    if if_match.strip() != "*" and current not in [tag.strip() for tag in if_match.split(",")]:
        raise PreconditionError(
            f"{ref.kind} {ref.name}: expected If-Match {current}, got {if_match}"
        )


def edit(state: State, ref: Ref, after: Body | None) -> list[Change]:
    """Make the change of one document; none, if nothing changes."""
    before = state.body(ref)
    return [] if before == after else [Change(ref, before, after)]


def _dump(document: PolicyDocument | TenantDocument | KeyDocument) -> Body:
    return document.model_dump(mode="json", exclude_none=isinstance(document, PolicyDocument))


def require_policy(state: State, name: str) -> None:
    """Refuse the name of neither the default policy nor a tenant's."""
    if name != DEFAULT and state.tenant(name) is None:
        raise NotFoundError(f"policy {name!r}: expected {DEFAULT!r} or a tenant's name")


def patch_policy(
    name: str,
    changes: Fields,
    if_match: str | None,
    *,
    now: datetime,
    ttl_seconds: int | None = None,
    canary_percent: int | None = None,
) -> Operation:
    """Set some of a policy's fields, or take them back.

    Args:
        changes: values as they are stored; None takes a field back.
        ttl_seconds: after how long the fields go back to what they are now; None: never.
        canary_percent: of the requests that try the fields; 0 ends the canary, 100 gives its fields
            to all requests; None: all get the fields, and a canary stays as it is. Beside it, None
            takes a field out of the canary.
    """
    if canary_percent is not None and ttl_seconds is not None:
        raise InvalidError("policy: expected ttl_seconds or canary_percent, got both")

    def operate(state: State) -> list[Change]:
        require_policy(state, name)
        ref = Ref("policy", name)
        require_match(state, ref, if_match)
        stored = state.stored_policy(name)
        if canary_percent is not None and canary_percent < 100:
            return _edit_policy(state, name, _with_canary(stored, changes, canary_percent))
        made = changes
        if canary_percent is not None:
            if stored.canary is None:
                raise ConflictError(f"policy {name!r}: no canary to give to all requests")
            made = _merged(stored.canary.fields, changes)
        return _edit_policy(state, name, _with_fields(stored, made, canary_percent is not None))

    def _with_fields(stored: PolicyDocument, changes: Fields, promoted: bool) -> PolicyDocument:
        fields = _merged(stored.fields, changes)
        expires = stored.expires
        if ttl_seconds is not None:
            # A change for a while on top of another goes back to what was meant to last.
            restore = stored.expires.restore if stored.expires else stored.fields
            until = timestamp(now + timedelta(seconds=ttl_seconds))
            expires = Expiry(at=until, restore=restore)
        elif expires is not None:  # what is meant to last outlives what is not
            expires = Expiry(at=expires.at, restore=_merged(expires.restore, changes))
        canary = None if promoted else stored.canary
        return PolicyDocument(fields=fields, expires=expires, canary=canary)

    return operate


def _with_canary(stored: PolicyDocument, changes: Fields, percent: int) -> PolicyDocument:
    """Change what some requests try, or end it."""
    if percent == 0:
        if changes:
            raise InvalidError("canary_percent=0 ends the canary: expected no fields beside it")
        return stored.model_copy(update={"canary": None})
    fields = _merged(stored.canary.fields if stored.canary else {}, changes)
    if not fields:
        raise InvalidError("a canary needs something to try: expected a field, got none")
    return stored.model_copy(update={"canary": Canary(percent=percent, fields=fields)})


def _edit_policy(state: State, name: str, policy: PolicyDocument) -> list[Change]:
    """Make the change of a policy; nothing is stored of one that sets nothing."""
    empty = not policy.fields and policy.expires is None and policy.canary is None
    return edit(state, Ref("policy", name), None if empty else _dump(policy))


def _merged(fields: Fields, changes: Fields) -> Fields:
    """Apply a merge patch."""
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def expire_policies(now: datetime) -> Operation:
    """Take back what was set for a while, where that while is over."""

    def operate(state: State) -> list[Change]:
        changes = []
        for ref, found in state.read.items():
            if not isinstance(found, PolicyDocument) or found.expires is None:
                continue
            if moment(found.expires.at) <= now:
                restored = PolicyDocument(fields=found.expires.restore, canary=found.canary)
                changes += _edit_policy(state, ref.name, restored)
        return changes

    return operate


def create_tenant(
    name: str,
    description: str,
    *,
    now: datetime,
    most_tenants: int = MOST_TENANTS,
    reserved: frozenset[str] = frozenset(),
) -> Operation:
    """Make a tenant, with the default policy until something is set.

    Args:
        most_tenants: that there may be.
        reserved: names that mean something else to the engine.
    """

    def operate(state: State) -> list[Change]:
        if name == DEFAULT:
            raise InvalidError(
                f"tenant: expected another name than {DEFAULT!r}, the default policy's"
            )
        if name in reserved:
            raise ConflictError(f"tenant {name!r}: a policy of --spin-policies has this name")
        if state.tenant(name) is not None:
            raise ConflictError(f"tenant {name!r} exists")
        if len(state.tenants) >= most_tenants:
            raise ConflictError(
                f"tenants: expected at most {most_tenants:,}, as many as the policy table has rows"
            )
        body = _dump(TenantDocument(description=description, created_at=timestamp(now)))
        return edit(state, Ref("tenant", name), body)

    return operate


def describe_tenant(name: str, description: str, if_match: str | None) -> Operation:
    """Change what is said about a tenant."""

    def operate(state: State) -> list[Change]:
        if (tenant := state.tenant(name)) is None:
            raise NotFoundError(f"tenant {name!r}")
        require_match(state, Ref("tenant", name), if_match)
        changed = tenant.model_copy(update={"description": description})
        return edit(state, Ref("tenant", name), _dump(changed))

    return operate


def delete_tenant(name: str, if_match: str | None) -> Operation:
    """Delete a tenant, its policy and its keys."""

    def operate(state: State) -> list[Change]:
        if state.tenant(name) is None:
            raise NotFoundError(f"tenant {name!r}")
        require_match(state, Ref("tenant", name), if_match)
        gone = [Ref("tenant", name), Ref("policy", name)]
        gone += [Ref("key", n) for n in state.keys if (k := state.key(n)) and k.tenant == name]
        return [change for ref in gone for change in edit(state, ref, None)]

    return operate


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
            raise NotFoundError(f"tenant {document.tenant!r}")
        if document.expires_at is not None and moment(document.expires_at) <= now:
            raise InvalidError(f"expires_at: expected a time to come, got {document.expires_at}")
        if len(state.keys) >= MOST_KEYS:
            raise ConflictError(f"keys: expected at most {MOST_KEYS:,}")
        return edit(state, Ref("key", key.key_id), _dump(document))

    return operate


def revoke_key(key_id: str, if_match: str | None) -> Operation:
    """Delete a key; it is refused from now on."""

    def operate(state: State) -> list[Change]:
        if state.key(key_id) is None:
            raise NotFoundError(f"key {key_id!r}")
        require_match(state, Ref("key", key_id), if_match)
        return edit(state, Ref("key", key_id), None)

    return operate


def rotate_key(
    key_id: str, successor: NewKey, overlap_seconds: int, if_match: str | None, *, now: datetime
) -> Operation:
    """Add a key like another, which is refused once the overlap is over."""

    def operate(state: State) -> list[Change]:
        if (key := state.key(key_id)) is None:
            raise NotFoundError(f"key {key_id!r}")
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
            *edit(state, ref, _dump(retired)),
            *edit(state, Ref("key", successor.key_id), _dump(added)),
        ]

    return operate


def bodies_at(state: State, later: Iterable[Commit]) -> dict[Ref, Body]:
    """Get the documents as they were, by undoing the commits made since; keys are left out.

    Args:
        later: the commits after the wanted revision, in any order.
    """
    bodies = {ref: d.body for ref, d in state.documents.items() if ref.kind != "key"}
    for commit in sorted(later, key=lambda commit: -commit.revision):
        for change in commit.changes:
            if change.ref.kind == "key":
                continue
            if change.before is None:
                bodies.pop(change.ref, None)
            else:
                bodies[change.ref] = change.before
    return bodies


def difference(before: Mapping[Ref, Body], after: Mapping[Ref, Body]) -> list[Change]:
    """Get what leads from one set of documents to another."""
    return [
        Change(ref, before.get(ref), after.get(ref))
        for ref in sorted({*before, *after})
        if before.get(ref) != after.get(ref)
    ]


def restore(wanted: Mapping[Ref, Body], base: int) -> Operation:
    """Bring policies and tenants back; keys stay, for a revert must not revive a revoked one.

    Args:
        wanted: the documents as they are to be.
        base: the revision that they were worked out at.
    """

    def operate(state: State) -> list[Change]:
        if state.revision != base:
            raise PreconditionError(
                f"expected revision {base}, got {state.revision}: somebody else wrote"
            )
        now = {ref: d.body for ref, d in state.documents.items() if ref.kind != "key"}
        changes = difference(now, wanted)
        # Keys of a tenant that goes with the revert go too; it must not come back with them.
        gone = {c.ref.name for c in changes if c.ref.kind == "tenant" and c.after is None}
        for key_id in state.keys:
            if (key := state.key(key_id)) and key.tenant in gone:
                changes += edit(state, Ref("key", key_id), None)
        return changes

    return operate


def together(operations: Iterable[Operation]) -> Operation:
    """Put operations into one commit, each on what the ones before it made."""
    operations = tuple(operations)  # they may be tried more than once

    def operate(state: State) -> list[Change]:
        merged: dict[Ref, Change] = {}
        for operation in operations:
            changes = operation(state)
            if not changes:
                continue
            state = state.after(changes)
            for change in changes:
                first = merged.get(change.ref, change)
                merged[change.ref] = Change(change.ref, first.before, change.after)
        return [change for change in merged.values() if change.before != change.after]

    return operate


def visible(body: Any) -> Any:
    """Show a document's body without what only the server needs."""
    if isinstance(body, dict):
        return {key: value for key, value in body.items() if key != "sha256"}
    return body
