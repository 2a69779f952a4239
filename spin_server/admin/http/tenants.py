"""Tenants: who shares the service."""

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from spin_server.admin.documents import Limits, Name, PolicyPatch
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import (
    Caller_,
    IfMatch,
    Page_,
    Read_,
    Write_,
    page,
    show_dry_run,
    warnings,
)
from spin_server.admin.http.policies import show_policy
from spin_server.admin.operations import (
    create_tenant,
    delete_tenant,
    etag,
    patch_policy,
    patch_tenant,
    require_tenant,
    together,
)
from spin_server.admin.state import State
from spin_server.admin.store.interface import Ref
from spin_server.key_text import blacked_out

router = APIRouter(prefix="/v1/tenants", tags=["tenants"])

Description = Annotated[
    str,
    Field(max_length=200, description="for people", examples=["Search"]),
    AfterValidator(blacked_out),
]


class NewTenant(BaseModel):
    """A tenant to make."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    description: Description = ""
    limits: Limits = Limits()
    policy: PolicyPatch = Field(default=PolicyPatch(), description="fields that differ")


class TenantPatch(BaseModel):
    """What may change of a tenant."""

    model_config = ConfigDict(extra="forbid")

    description: Description | None = None
    limits: Limits | None = Field(default=None, description="a merge patch: null lifts a limit")


def show_tenant(state: State, name: str) -> dict[str, Any]:
    """Show a tenant and its policy."""
    tenant = state.tenant(name)
    assert tenant is not None
    return {
        "name": name,
        "revision": state.revision_of(Ref("tenant", name)),
        "description": tenant.description,
        "created_at": tenant.created_at,
        "limits": tenant.limits.model_dump(),
        "policy": show_policy(state, name),
    }


@router.get("", summary="List tenants", **described(answers.Page[answers.Tenant]))
async def list_tenants(caller: Caller_, query: Page_) -> dict[str, Any]:
    """All tenants by name; a key that is bound to one sees that one."""
    caller.principal.require("read", caller.principal.tenant)
    state = caller.administration.in_force
    own = caller.principal.tenant
    names = state.tenants if own is None else [n for n in state.tenants if n == own]
    found, cursor = page(names, query.cursor, query.limit)
    return {"items": [show_tenant(state, name) for name in found], "next_cursor": cursor}


@router.post(
    "",
    status_code=201,
    summary="Make a tenant",
    **described(answers.DryRun, made=answers.TenantMade),
)
async def create(
    tenant: NewTenant, caller: Caller_, query: Write_, response: Response
) -> dict[str, Any]:
    """The tenant and what is given of its policy are made in one commit."""
    caller.principal.require("write")
    now, link = caller.administration.clock(), caller.services.link
    operations = [
        create_tenant(
            tenant.name,
            tenant.description,
            now=now,
            limits=tenant.limits,
            most_tenants=link.capacity - link.first_row,
            reserved=link.reserved,
        )
    ]
    if changes := tenant.policy.changes():
        operations.append(patch_policy(tenant.name, changes, "*", now=now))
    outcome = await caller.perform(together(operations), query)
    if query.dry_run:
        response.status_code = 200
        return show_dry_run(outcome)
    response.headers["ETag"] = etag(outcome.state.revision)
    response.headers["Location"] = f"/v1/tenants/{tenant.name}"
    return {
        **show_tenant(outcome.state, tenant.name),
        "applied": await caller.applied(outcome, {tenant.name}),
    }


@router.get("/{name}", summary="Read a tenant", **described(answers.Tenant, etag=True))
async def read(name: Name, caller: Caller_, _: Read_, response: Response) -> dict[str, Any]:
    """The tenant, with its policy as it is in force."""
    caller.principal.require("read", name)
    state = caller.administration.in_force
    require_tenant(state, name)
    response.headers["ETag"] = etag(state.revision_of(Ref("tenant", name)))
    return show_tenant(state, name)


@router.patch(
    "/{name}",
    summary="Describe or limit a tenant",
    **described(answers.Tenant | answers.DryRun, etag=True),
)
async def change(
    name: Name,
    patch: TenantPatch,
    caller: Caller_,
    query: Write_,
    response: Response,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Change the description or the limits; the policy is changed at `/v1/policies/{name}`.

    Nobody whose key is bound to the tenant changes its limits.
    """
    caller.principal.require("write", name if patch.limits is None else None)
    operation = patch_tenant(name, if_match, description=patch.description, limits=patch.limits)
    outcome = await caller.perform(operation, query)
    if query.dry_run:
        return show_dry_run(outcome)
    response.headers["ETag"] = etag(outcome.state.revision_of(Ref("tenant", name)))
    return show_tenant(outcome.state, name)


@router.delete(
    "/{name}",
    summary="Delete a tenant",
    **described(answers.TenantDeleted | answers.DryRun),
)
async def delete(
    name: Name, caller: Caller_, query: Write_, if_match: IfMatch = None
) -> dict[str, Any]:
    """Its policy and its keys go with it."""
    caller.principal.require("write")
    outcome = await caller.perform(delete_tenant(name, if_match), query)
    if query.dry_run:
        return show_dry_run(outcome)
    return {
        "deleted": name,
        "warnings": warnings(outcome),
        "applied": await caller.applied(outcome, set()),
    }
