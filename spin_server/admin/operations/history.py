"""How the documents were, and the way back."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from spin_server.admin.documents import DEFAULT, PolicyDocument
from spin_server.admin.errors import (
    PreconditionError,
)
from spin_server.admin.operations.base import NOTHING_SET, Operation, dump, edit, set_body
from spin_server.admin.state import State, check
from spin_server.admin.store.interface import Body, Change, Commit, Ref


def bodies_at(state: State, later: Iterable[Commit]) -> dict[Ref, Body]:
    """Get the documents as they were, by undoing the commits made since.

    Keys are left out, and policies of which nothing was set any more.

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
    return {ref: body for ref, body in bodies.items() if set_body(body) is not None}


def without_ended(bodies: Mapping[Ref, Body], now: datetime) -> tuple[dict[Ref, Body], list[str]]:
    """Leave out what was set until a time that has passed.

    Returns:
        The documents, and the names of the policies that lack something now.

    Raises:
        StoreError: a policy that this release cannot read.
    """
    found, ended = dict(bodies), []
    for ref, body in bodies.items():
        if ref.kind != "policy" or "expires" not in body:
            continue
        policy = check(ref, body)
        assert isinstance(policy, PolicyDocument)
        if (left := policy.at(now)) is not policy:
            ended.append(ref.name)
            found[ref] = dump(left)
    return found, sorted(ended)


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
        kept = dict(wanted)
        for ref in now.keys() - wanted.keys():
            if ref.kind == "policy" and (ref.name == DEFAULT or ("tenant", ref.name) in wanted):
                kept[ref] = NOTHING_SET  # its owner stays, and may have read an ETag before
        changes = [c for r in sorted({*now, *kept}) for c in edit(state, r, kept.get(r))]
        # Keys of a tenant that goes with the revert go too; it must not come back with them.
        gone = {c.ref.name for c in changes if c.ref.kind == "tenant" and c.after is None}
        for key_id in state.keys:
            if (key := state.key(key_id)) and key.tenant in gone:
                changes += edit(state, Ref("key", key_id), None)
        return changes

    return operate
