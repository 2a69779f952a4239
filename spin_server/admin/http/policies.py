"""Policies: the default one, and each tenant's."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field

from spin_server.admin.documents import (
    DEFAULT,
    POLICY_FIELDS,
    Name,
    PolicyDocument,
    PolicyPatch,
    shown,
)
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import (
    Caller_,
    IfMatch,
    Read_,
    WholeNumber,
    WriteQuery,
    show_dry_run,
    show_prefix_cache,
)
from spin_server.admin.operations import etag, patch_policy, require_policy
from spin_server.admin.state import State
from spin_server.admin.store.interface import Ref

router = APIRouter(prefix="/v1/policies", tags=["policies"])

PolicyName = Annotated[Name, Path(description=f"`{DEFAULT}`, or a tenant's name")]


class PolicyQuery(WriteQuery):
    """Parameters of a change of a policy."""

    ttl_seconds: WholeNumber | None = Field(
        default=None,
        ge=1,
        le=366 * 86400,
        description="after how long the fields go back to what they are now by themselves",
    )
    canary_percent: WholeNumber | None = Field(
        default=None,
        ge=0,
        le=100,
        description="of the requests that try the fields; 0 ends that, 100 gives them to all",
    )


def owner(name: str) -> str | None:
    """Get the tenant whose policy it is; None for the default policy."""
    return None if name == DEFAULT else name


def show_policy(state: State, name: str) -> dict[str, Any]:
    """Show a policy as it is in force, and where each value comes from."""
    effective, stored = state.effective(name), state.stored_policy(name)
    return {
        "name": name,
        "revision": state.revision_of(Ref("policy", name)),
        "fields": {
            field: {"value": shown(field, value), "source": effective.sources[field]}
            for field, value in effective.fields.items()
        },
        "expires_at": stored.expires.at if stored.expires else None,
        "canary": _show_canary(stored),
    }


def _show_canary(stored: PolicyDocument) -> dict[str, Any] | None:
    if (canary := stored.canary) is None:
        return None
    given = canary.fields
    fields = {field: shown(field, given[field]) for field in POLICY_FIELDS if field in given}
    return {"percent": canary.percent, "fields": fields}


@router.get("/{name}", summary="Read a policy", **described(answers.Policy, etag=True))
async def read(name: PolicyName, caller: Caller_, _: Read_, response: Response) -> dict[str, Any]:
    """Every field with its value and where it comes from: `tenant`, `default` or `launch`."""
    caller.principal.require("read", owner(name))
    state = caller.administration.in_force
    require_policy(state, name)
    response.headers["ETag"] = etag(state.revision_of(Ref("policy", name)))
    return show_policy(state, name)


@router.patch(
    "/{name}",
    summary="Change a policy",
    **described(answers.PolicyChanged | answers.PolicyDryRun, etag=True),
)
async def change(
    name: PolicyName,
    patch: PolicyPatch,
    caller: Caller_,
    query: Annotated[PolicyQuery, Query()],
    response: Response,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Set some fields, or take them back with null, while requests run.

    The answer comes once the policy tables of all workers hold it (`applied`, read back from each);
    a request that is running takes it at its next step. With `ttl_seconds` it ends by itself; with
    `canary_percent` some requests try it first.
    """
    caller.principal.require("write", owner(name))
    operation = patch_policy(
        name,
        patch.changes(),
        if_match,
        now=caller.administration.clock(),
        ttl_seconds=query.ttl_seconds,
        canary_percent=query.canary_percent,
    )
    outcome = await caller.perform(operation, query)
    if query.dry_run:
        return {**show_dry_run(outcome), "policy": show_policy(outcome.state, name)}
    response.headers["ETag"] = etag(outcome.state.revision_of(Ref("policy", name)))
    return {
        **show_policy(outcome.state, name),
        "prefix_cache": show_prefix_cache(outcome),
        "applied": await caller.applied(outcome, {name}),
    }
