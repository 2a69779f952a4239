"""Revisions and the audit log: what changed, who changed it, and the way back."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from spin_server.admin.errors import InvalidError, PreconditionError, UnconditionalError
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import (
    Caller_,
    IfMatch,
    Page_,
    PageQuery,
    ReadQuery,
    WholeNumber,
    Write_,
    show_changes,
    show_dry_run,
    show_prefix_cache,
    warnings,
)
from spin_server.admin.operations import difference, etag, matches, restore, without_ended
from spin_server.admin.store.interface import Commit

router = APIRouter(tags=["revisions"])

Revision = Annotated[WholeNumber, Path(ge=0, le=2**53, examples=[1])]


class DiffQuery(ReadQuery):
    """What to compare with."""

    against: WholeNumber | None = Field(
        default=None, ge=0, le=2**53, description="another revision; the newest unless given"
    )


def _show(commit: Commit) -> dict[str, Any]:
    entry = commit.entry
    return {
        "revision": commit.revision,
        "at": entry.at,
        "actor": entry.actor,
        "action": entry.action,
        "reason": entry.reason,
        "request_id": entry.request_id,
    }


async def _commits(caller: Caller_, query: PageQuery) -> tuple[list[Commit], str | None]:
    if query.cursor and not query.cursor.isdigit():
        raise InvalidError("cursor: expected the next_cursor of the page before")
    before = min(int(query.cursor), 2**53) if query.cursor else None
    found = await run_in_threadpool(caller.administration.log, before=before, limit=query.limit + 1)
    more = len(found) > query.limit
    found = found[: query.limit]
    return found, str(found[-1].revision) if more else None


@router.get(
    "/v1/audit", summary="Read the audit log", **described(answers.Page[answers.AuditEntry])
)
async def audit(caller: Caller_, query: Page_) -> dict[str, Any]:
    """Who changed what, when and why, newest first; no entry can be changed or removed."""
    caller.principal.require("audit")
    found, cursor = await _commits(caller, query)
    items = [{**_show(c), "changes": show_changes(c.changes)} for c in found]
    return {"items": items, "next_cursor": cursor}


@router.get("/v1/revisions", summary="List revisions", **described(answers.Page[answers.Revision]))
async def list_revisions(caller: Caller_, query: Page_) -> dict[str, Any]:
    """All revisions, newest first, and which documents each changed."""
    caller.principal.require("read")
    found, cursor = await _commits(caller, query)
    items = [
        {**_show(c), "changed": [f"{change.ref.kind} {change.ref.name}" for change in c.changes]}
        for c in found
    ]
    return {"items": items, "next_cursor": cursor}


@router.get(
    "/v1/revisions/{revision}/diff", summary="Compare two revisions", **described(answers.Diff)
)
async def diff(
    revision: Revision, caller: Caller_, query: Annotated[DiffQuery, Query()]
) -> dict[str, Any]:
    """What leads from one revision's policies and tenants to another's; keys are left out."""
    caller.principal.require("read")
    _, before = await run_in_threadpool(caller.administration.bodies_at, revision)
    against = caller.administration.state.revision if query.against is None else query.against
    _, after = await run_in_threadpool(caller.administration.bodies_at, against)
    return {"from": revision, "to": against, "changes": show_changes(difference(before, after))}


@router.post(
    "/v1/revisions/{revision}/revert",
    summary="Go back to a revision",
    **described(answers.Committed | answers.DryRun),
)
async def revert(
    revision: Revision, caller: Caller_, query: Write_, if_match: IfMatch = None
) -> dict[str, Any]:
    """Bring policies and tenants back to what they were, in a new revision.

    `If-Match` names the newest revision. Keys stay as they are: a revoked key is not revived. What
    was set until a time that has passed is not brought back, but what was meant to last is.
    """
    caller.principal.require("write")
    base, then = await run_in_threadpool(caller.administration.bodies_at, revision)
    wanted, ended = without_ended(then, caller.administration.clock())
    if if_match is None:
        raise UnconditionalError(f"expected If-Match: {etag(base)}, the newest revision")
    if not matches(if_match, etag(base)):
        raise PreconditionError(f"expected If-Match {etag(base)}, the newest, got {if_match}")
    outcome = await caller.perform(restore(wanted, base), query)
    if query.dry_run:
        return show_dry_run(outcome, ended)
    return {
        "revision": outcome.state.revision,
        "changes": show_changes(outcome.changes),
        "prefix_cache": show_prefix_cache(outcome),
        "warnings": warnings(outcome, ended),
        "applied": await caller.applied(outcome, {change.ref.name for change in outcome.changes}),
    }
