"""Keys: shown once, kept as hashes."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StrictInt

from spin_server.admin.documents import Name, Scope
from spin_server.admin.errors import NotFoundError
from spin_server.admin.http import answers
from spin_server.admin.http.answers import described
from spin_server.admin.http.context import (
    Caller,
    Caller_,
    IfMatch,
    Page_,
    Read_,
    Write_,
    page,
    show_dry_run,
)
from spin_server.admin.http.tenants import Description
from spin_server.admin.http.words import KEY_ID_PATTERN
from spin_server.admin.operations import NewKey, create_key, etag, revoke_key, rotate_key
from spin_server.admin.state import State
from spin_server.admin.store.interface import Ref

router = APIRouter(prefix="/v1/keys", tags=["keys"])

KeyId = Annotated[str, Field(pattern=KEY_ID_PATTERN, examples=["key-0123456789abcdef"])]
_NEVER = datetime(9999, 1, 1, tzinfo=UTC)


class KeyRequest(BaseModel):
    """A key to make."""

    model_config = ConfigDict(extra="forbid")

    tenant: Name | None = Field(default=None, description="the only one it is good for; null: all")
    scopes: list[Scope] = Field(
        default=[],
        max_length=4,
        description="what it may do here; none: it is for the serving API only",
        examples=[["read"]],
    )
    description: Description = ""
    expires_at: AwareDatetime | None = Field(
        default=None,
        lt=_NEVER,
        description="when it ends; null: never",
        examples=["2030-01-01T00:00:00Z"],
    )


class Rotation(BaseModel):
    """How a key is replaced."""

    model_config = ConfigDict(extra="forbid")

    overlap_seconds: StrictInt = Field(
        default=3600, ge=0, le=90 * 86400, description="for how long the old key goes on"
    )


def show_key(state: State, key_id: str, now: datetime) -> dict[str, Any]:
    """Show everything of a key but the key."""
    key = state.key(key_id)
    assert key is not None
    return {
        "id": key_id,
        "revision": state.revision_of(Ref("key", key_id)),
        **key.model_dump(mode="json", exclude={"sha256"}),
        "ended": key.ended(now),
    }


def _require(caller: Caller, key_id: str, doing: str) -> None:
    """Refuse a caller who may not manage this key; what he may not see does not exist."""
    caller.principal.require("keys", caller.principal.tenant)
    key = caller.administration.state.key(key_id)
    if key is None or caller.principal.tenant not in (None, key.tenant):
        raise NotFoundError(f"no key {key_id!r}")
    caller.principal.require_grantable(set(key.scopes), key.tenant, doing)


@router.get("", summary="List keys", **described(answers.Page[answers.Key]))
async def list_keys(caller: Caller_, query: Page_) -> dict[str, Any]:
    """All keys, without the keys; a caller who is bound to a tenant sees that tenant's."""
    own = caller.principal.tenant
    caller.principal.require("keys", own)
    state = caller.administration.state
    ids = [n for n in state.keys if own is None or ((k := state.key(n)) and k.tenant == own)]
    found, cursor = page(ids, query.cursor, query.limit)
    now = caller.administration.clock()
    return {"items": [show_key(state, key_id, now) for key_id in found], "next_cursor": cursor}


@router.post(
    "",
    status_code=201,
    summary="Make a key",
    **described(answers.DryRun, made=answers.KeyMade),
)
async def create(
    request: KeyRequest, caller: Caller_, query: Write_, response: Response
) -> dict[str, Any]:
    """The answer holds the key itself (`key`), once and never again.

    Nobody can grant a scope that his own key does not have, or a key for a tenant that is not his.
    """
    caller.principal.require_grantable(set(request.scopes), request.tenant)
    now, key = caller.administration.clock(), NewKey.draw()
    document = key.document(
        tenant=request.tenant,
        scopes=request.scopes,
        description=request.description,
        now=now,
        expires_at=request.expires_at,
    )
    outcome = await caller.perform(create_key(key, document, now=now), query)
    if query.dry_run:
        response.status_code = 200
        return show_dry_run(outcome)
    response.headers["ETag"] = etag(outcome.state.revision)
    response.headers["Location"] = f"/v1/keys/{key.key_id}"
    return {**show_key(outcome.state, key.key_id, now), "key": key.secret}


@router.get("/{key_id}", summary="Read a key", **described(answers.Key, etag=True))
async def read(key_id: KeyId, caller: Caller_, _: Read_, response: Response) -> dict[str, Any]:
    """Everything of a key but the key."""
    _require(caller, key_id, "read")
    state = caller.administration.state
    response.headers["ETag"] = etag(state.revision_of(Ref("key", key_id)))
    return show_key(state, key_id, caller.administration.clock())


@router.delete(
    "/{key_id}", summary="Revoke a key", **described(answers.KeyRevoked | answers.DryRun)
)
async def revoke(
    key_id: KeyId, caller: Caller_, query: Write_, if_match: IfMatch = None
) -> dict[str, Any]:
    """It is refused from now on; a key revokes only what it could grant."""
    _require(caller, key_id, "revoke")
    outcome = await caller.perform(revoke_key(key_id, if_match), query)
    return show_dry_run(outcome) if query.dry_run else {"revoked": key_id}


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Replace a key",
    **described(answers.DryRun, made=answers.KeyRotated),
)
async def rotate(
    key_id: KeyId,
    rotation: Rotation,
    caller: Caller_,
    query: Write_,
    response: Response,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Make a key like this one, which itself ends once the overlap is over."""
    _require(caller, key_id, "replace")
    now, successor = caller.administration.clock(), NewKey.draw()
    operation = rotate_key(key_id, successor, rotation.overlap_seconds, if_match, now=now)
    outcome = await caller.perform(operation, query)
    if query.dry_run:
        response.status_code = 200
        return show_dry_run(outcome)
    response.headers["ETag"] = etag(outcome.state.revision)
    response.headers["Location"] = f"/v1/keys/{successor.key_id}"
    return {
        **show_key(outcome.state, successor.key_id, now),
        "key": successor.secret,
        "replaces": show_key(outcome.state, key_id, now),
    }
