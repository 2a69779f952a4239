"""What all operations on the documents share."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from spin_server.admin.documents import (
    KeyDocument,
    PolicyDocument,
    TenantDocument,
    shown,
)
from spin_server.admin.errors import (
    PreconditionError,
    UnconditionalError,
)
from spin_server.admin.state import State
from spin_server.admin.store.interface import Body, Change, Ref
from spin_server.errors import InputError

Operation = Callable[[State], list[Change]]
# A policy whose last field was taken back keeps this, and so the revision that took it: without a
# document it would have its tenant's ETag again, which somebody may have read long before.
NOTHING_SET: Body = {"fields": {}}


def etag(revision: int) -> str:
    """Write a document's revision as a strong entity tag."""
    return f'"{revision}"'


def matches(if_match: str, current: str) -> bool:
    """Say whether an `If-Match` is met by an ETag."""
    return if_match.strip() == "*" or current in [tag.strip() for tag in if_match.split(",")]


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
    if not matches(if_match, current):
        raise PreconditionError(
            f"{ref.kind} {ref.name}: expected If-Match {current}, got {if_match}"
        )


def set_body(body: Body | None) -> Body | None:
    """Get a document's body, or None for a policy of which nothing is set (any more)."""
    return None if body == NOTHING_SET else body


def edit(state: State, ref: Ref, after: Body | None) -> list[Change]:
    """Make the change of one document; none, if nothing changes."""
    before = state.body(ref)
    if before == after or (before is None and set_body(after) is None):
        return []
    return [Change(ref, before, after)]


def dump(document: PolicyDocument | TenantDocument | KeyDocument) -> Body:
    """Make a document's body, as it is stored."""
    return document.model_dump(
        mode="json",
        exclude_none=isinstance(document, PolicyDocument),
        exclude_defaults=isinstance(document, TenantDocument),
    )


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
        return [
            change
            for change in merged.values()
            if change.before != change.after
            and not (change.before is None is set_body(change.after))
        ]

    return operate


def visible(body: Any) -> Any:
    """Show a document's body as the API speaks of it: shares as numbers, and no hashes of keys.

    It may be an old one, so nothing is taken for granted.
    """
    if not isinstance(body, dict):
        return body
    found = {}
    for name, value in body.items():
        if name != "sha256":
            with suppress(InputError):
                value = shown(name, value) if isinstance(value, str) else visible(value)
            found[name] = value
    return found
