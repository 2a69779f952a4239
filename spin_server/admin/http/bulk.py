"""Several changes in one commit: all of them, or none."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from spin_server.admin.access import Principal
from spin_server.admin.documents import Limits, Name, PolicyPatch
from spin_server.admin.engine_link import EngineLink
from spin_server.admin.errors import ConflictError
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import (
    Caller_,
    Write_,
    show_changes,
    show_dry_run,
    show_prefix_cache,
    warnings,
)
from spin_server.admin.http.policies import owner
from spin_server.admin.http.tenants import Description
from spin_server.admin.operations import (
    Operation,
    create_tenant,
    delete_tenant,
    patch_policy,
    patch_tenant,
    together,
)

router = APIRouter(prefix="/v1/bulk", tags=["bulk"])

_Match = Annotated[str, Field(max_length=100, description="as the header", examples=['"7"'])]


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name


class PatchPolicy(_Step):
    """As `PATCH /v1/policies/{name}`."""

    op: Literal["patch_policy"]
    patch: PolicyPatch
    if_match: _Match
    ttl_seconds: StrictInt | None = Field(default=None, ge=1, le=366 * 86400)
    canary_percent: StrictInt | None = Field(default=None, ge=0, le=100)


class CreateTenant(_Step):
    """As `POST /v1/tenants`."""

    op: Literal["create_tenant"]
    description: Description = ""
    limits: Limits = Limits()


class PatchTenant(_Step):
    """As `PATCH /v1/tenants/{name}`."""

    op: Literal["patch_tenant"]
    description: Description | None = None
    limits: Limits | None = None
    if_match: _Match


class DeleteTenant(_Step):
    """As `DELETE /v1/tenants/{name}`."""

    op: Literal["delete_tenant"]
    if_match: _Match


Step = Annotated[PatchPolicy | CreateTenant | PatchTenant | DeleteTenant, Field(discriminator="op")]


class Bulk(BaseModel):
    """Changes, each based on what the ones before it made."""

    model_config = ConfigDict(extra="forbid")

    operations: list[Step] = Field(
        min_length=1,
        max_length=500,
        examples=[
            [
                {"op": "create_tenant", "name": "search-team"},
                {
                    "op": "patch_policy",
                    "name": "search-team",
                    "patch": {"target_sparsity": 0.5},
                    "if_match": "*",
                },
            ]
        ],
    )


def _operation(step: Step, principal: Principal, now: datetime, link: EngineLink) -> Operation:
    if isinstance(step, CreateTenant):
        principal.require("write")
        return create_tenant(
            step.name,
            step.description,
            now=now,
            limits=step.limits,
            most_tenants=link.capacity - link.first_row,
            reserved=link.reserved,
        )
    if isinstance(step, DeleteTenant):
        principal.require("write")
        return delete_tenant(step.name, step.if_match)
    if isinstance(step, PatchTenant):
        principal.require("write", step.name if step.limits is None else None)
        return patch_tenant(
            step.name, step.if_match, description=step.description, limits=step.limits
        )
    principal.require("write", owner(step.name))
    return patch_policy(
        step.name,
        step.patch.changes(),
        step.if_match,
        now=now,
        ttl_seconds=step.ttl_seconds,
        canary_percent=step.canary_percent,
    )


@router.post(
    "", summary="Make several changes at once", **described(answers.Committed | answers.DryRun)
)
async def apply(bulk: Bulk, caller: Caller_, query: Write_) -> dict[str, Any]:
    """All changes make one revision; if one is refused, none is made."""
    now, link = caller.administration.clock(), caller.services.link
    gone = {step.name for step in bulk.operations if isinstance(step, DeleteTenant)}
    for step in bulk.operations:
        if isinstance(step, CreateTenant) and step.name in gone:
            # They might cancel out, and the tenant keep its prefixes and ETags.
            raise ConflictError(
                f"tenant {step.name!r}: expected to be made anew in a request of its own, got it "
                "beside its deletion"
            )
    operations = [_operation(step, caller.principal, now, link) for step in bulk.operations]
    outcome = await caller.perform(together(operations), query)
    if query.dry_run:
        return show_dry_run(outcome)
    return {
        "revision": outcome.state.revision,
        "changes": show_changes(outcome.changes),
        "prefix_cache": show_prefix_cache(outcome),
        "warnings": warnings(outcome),
        "applied": await caller.applied(outcome, {step.name for step in bulk.operations}),
    }
