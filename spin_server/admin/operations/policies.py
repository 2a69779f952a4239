"""What can be done to policies."""

from datetime import datetime, timedelta

from spin_server.admin.documents import (
    DEFAULT,
    Canary,
    Expiry,
    Fields,
    PolicyDocument,
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


def require_policy(state: State, name: str) -> None:
    """Refuse the name of neither the default policy nor a tenant's."""
    if name != DEFAULT and state.tenant(name) is None:
        raise NotFoundError(f"no policy {name!r}: expected {DEFAULT!r} or a tenant's name")


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
    if ttl_seconds is not None and not changes:
        raise InvalidError("ttl_seconds: expected a field to set for a while, got none")
    if canary_percent is not None and ttl_seconds is not None:
        raise InvalidError("policy: expected ttl_seconds or canary_percent, got both")

    def operate(state: State) -> list[Change]:
        require_policy(state, name)
        ref = Ref("policy", name)
        require_match(state, ref, if_match)
        stored = state.stored_policy(name)
        if canary_percent is not None and canary_percent < 100:
            return edit(state, ref, dump(_with_canary(stored, changes, canary_percent)))
        made = changes
        if canary_percent is not None:
            if stored.canary is None:
                raise ConflictError(f"policy {name!r}: no canary to give to all requests")
            made = _merged(stored.canary.fields, changes)
        return edit(state, ref, dump(_with_fields(stored, made, canary_percent is not None)))

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
        if expires is not None and expires.restore == fields:  # nothing is left to take back
            expires = None
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


def _merged(fields: Fields, changes: Fields) -> Fields:
    """Apply a merge patch."""
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def expire_policies(now: datetime) -> Operation:
    """Take back what was set for a while, where that while is over."""

    def operate(state: State) -> list[Change]:
        changes = []
        for ref, found in state.read.items():
            if isinstance(found, PolicyDocument) and (restored := found.at(now)) is not found:
                changes += edit(state, ref, dump(restored))
        return changes

    return operate


def begin_anew(before: State, after: State, changed: set[str]) -> list[str]:
    """Find whose requests find none of some cached prefixes any more.

    A prefix is found by requests of the same class: `exact`, where no block is skipped, or
    `sparse`. A class that a policy's requests were not in begins anew. So does `exact` when a row
    of theirs ceases to be: what is running goes on with it, under prefixes that no exact request
    may find.

    Args:
        changed: policies whose documents are not the same; the default one's moves tenants', too.
    """

    def exact(state: State, name: str, *, canary: bool) -> bool:
        return state.effective(name, canary=canary).policy.keeps_all

    def moved(name: str) -> bool:
        # A canary that is none has its policy's class, as what is left of its requests does.
        was, becomes = (
            [exact(state, name, canary=canary) for canary in (False, True)]
            for state in (before, after)
        )
        ceased = any(w and not b for w, b in zip(was, becomes, strict=True))
        return bool(set(becomes) - set(was)) or (ceased and True in becomes)

    names = set(changed)
    if exact(before, DEFAULT, canary=False) != exact(after, DEFAULT, canary=False):
        names |= set(before.tenants) & set(after.tenants)
    both = {DEFAULT, *before.tenants} & {DEFAULT, *after.tenants}
    return sorted(name for name in names & both if moved(name))
