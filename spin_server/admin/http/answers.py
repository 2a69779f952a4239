"""What the routes answer, for the OpenAPI description.

Answers are made where the routes are, and not put through these: one that did not fit would fail
after its change was made. The tests hold every answer that they get against the description.
"""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from spin_server.admin.documents import Limits, Name, Scope, Timestamp

Item = TypeVar("Item")

_ETAG = {
    "ETag": {
        "description": "the document's revision; `If-Match` names it",
        "schema": {"type": "string", "examples": ['"7"']},
    }
}


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rank(_Answer):
    """What one worker holds."""

    engine: int = Field(examples=[0])
    rank: int = Field(examples=[0])
    revision: int = Field(description="of the policies in its table", examples=[7])


class Applied(_Answer):
    """Whether a change is in force."""

    complete: bool = Field(description="whether every worker's table holds it")
    desired_revision: int = Field(examples=[7])
    ranks: list[Rank] = Field(description="what each worker's table holds, read back from it")
    trouble: str | None = Field(description="why it is not complete", examples=[None])


class Changed(_Answer):
    """What happens to one document."""

    kind: Literal["policy", "tenant", "key"]
    name: str = Field(examples=["search-team"])
    before: dict[str, Any] | None = Field(description="null: it is new")
    after: dict[str, Any] | None = Field(description="null: it is gone")


class PrefixCache(_Answer):
    """Whose cached prefixes are found no more by requests that begin now."""

    begin_anew: list[str] = Field(
        description="policies whose requests are in a class, skipping blocks or none, that they "
        "were not in before; the first hundred",
        examples=[["search-team"]],
    )
    count: int = Field(description="how many in all", examples=[1])


class DryRun(_Answer):
    """What a write would do."""

    dry_run: Literal[True]
    changes: list[Changed]
    clamps: list[dict[str, Any]] = Field(description="values that a guard rail would hold back")
    prefix_cache: PrefixCache
    warnings: list[str] = Field(description="what may not have been meant, in words")


class PolicyField(_Answer):
    """A value of a policy, and where it comes from."""

    value: float | int | str = Field(examples=[0.5])
    source: Literal["tenant", "default", "launch"]


class PolicyFields(_Answer):
    """All fields of a policy."""

    target_sparsity: PolicyField
    exploration_share: PolicyField
    exploration_policy: PolicyField
    budget: PolicyField
    probe_period: PolicyField
    ema_decay: PolicyField


class CanaryAnswer(_Answer):
    """What some of a policy's requests try."""

    percent: int = Field(ge=1, le=99, examples=[10])
    fields: dict[str, float | int | str] = Field(examples=[{"target_sparsity": 0.65}])


class Policy(_Answer):
    """A policy as it is in force."""

    name: Name
    revision: int = Field(description="which wrote it; 0: none did", examples=[7])
    fields: PolicyFields
    expires_at: Timestamp | None = Field(description="when it goes back by itself")
    canary: CanaryAnswer | None


class PolicyChanged(Policy):
    """A policy that was changed."""

    prefix_cache: PrefixCache
    applied: Applied


class PolicyDryRun(DryRun):
    """What a change of a policy would do."""

    policy: Policy


class Tenant(_Answer):
    """A tenant and its policy."""

    name: Name
    revision: int = Field(examples=[7])
    description: str = Field(examples=["Search"])
    created_at: Timestamp = Field(examples=["2026-12-31T23:59:59Z"])
    limits: Limits
    policy: Policy


class TenantMade(Tenant):
    """A tenant that was made."""

    applied: Applied


class TenantDeleted(_Answer):
    """A tenant that is gone."""

    deleted: Name
    warnings: list[str] = Field(description="what may not have been meant, in words")
    applied: Applied


class Key(_Answer):
    """Everything of a key but the key."""

    id: str = Field(examples=["key-0123456789abcdef"])
    revision: int = Field(examples=[7])
    prefix: str = Field(description="its first characters")
    tenant: Name | None = Field(description="the only one it is good for; null: all")
    scopes: list[Scope]
    description: str
    created_at: Timestamp
    expires_at: Timestamp | None
    replaced_by: str | None = Field(description="id of the key that took its place")
    ended: bool = Field(description="whether it is refused by now")


class KeyMade(Key):
    """A new key: the only answer that holds it."""

    key: str = Field(description="the key itself, shown this once")


class KeyRotated(KeyMade):
    """A new key, and the one that it replaces."""

    replaces: Key


class KeyRevoked(_Answer):
    """A key that is refused from now on."""

    revoked: str = Field(examples=["key-0123456789abcdef"])


class _Commit(_Answer):
    revision: int = Field(examples=[7])
    at: Timestamp
    actor: str = Field(description="id of the key, or who else", examples=["key-0123456789abcdef"])
    action: str = Field(examples=["PATCH /v1/policies/default"])
    reason: str = Field(examples=["INC-7"])
    request_id: str


class AuditEntry(_Commit):
    """Who changed what, when and why."""

    changes: list[Changed]


class Revision(_Commit):
    """A revision, and which documents it changed."""

    changed: list[str] = Field(examples=[["policy default"]])


class Diff(_Answer):
    """What leads from one revision to another."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    from_: int = Field(alias="from", examples=[6])
    to: int = Field(examples=[7])
    changes: list[Changed]


class Committed(_Answer):
    """A commit of several changes."""

    revision: int = Field(examples=[7])
    changes: list[Changed]
    prefix_cache: PrefixCache
    warnings: list[str] = Field(description="what may not have been meant, in words")
    applied: Applied


class Realized(_Answer):
    """What SPIN did so far."""

    sparse_step_blocks: int = Field(description="blocks of steps that skipped some")
    dense_step_blocks: int = Field(description="blocks of steps that scored everything")
    realized_sparsity: float | None = Field(description="null: no sparse step yet", examples=[0.5])
    realized_exploration: float | None = Field(examples=[0.05])


class RealizedByTenant(Realized):
    """What SPIN did so far, in all and for each tenant."""

    by_tenant: dict[str, Realized]


class TimeLimit(_Answer):
    """A policy that goes back by itself."""

    name: Name
    ends_at: Timestamp = Field(examples=["2026-12-31T23:59:59Z"])


class CanaryShare(_Answer):
    """A policy that some of its requests try a change of."""

    name: Name
    percent: int = Field(ge=1, le=99, examples=[10])


class Trouble(_Answer):
    """What is wrong; null: nothing."""

    store: str | None
    engine: str | None
    tenants: str | None


class Status(_Answer):
    """What is wanted, and what is."""

    desired_revision: int
    applied_revision: int | None
    behind_seconds: float
    ranks: list[Rank]
    default_policy: Policy | None = Field(description="null for a key that is bound to a tenant")
    tenant_policy: Policy | None = Field(description="of the key's tenant")
    realized: RealizedByTenant | None = Field(description="null: the engine does not answer")
    time_limits: list[TimeLimit] = Field(description="by their end; the first hundred")
    canaries: list[CanaryShare] = Field(description="by name; the first hundred")
    serving_needs_key: bool = Field(description="whether the serving API does: with tenants only")
    tenants: int | None
    keys: int | None
    trouble: Trouble


class Page(_Answer, Generic[Item]):
    """A part of a list."""

    items: list[Item]
    next_cursor: str | None = Field(description="for the next page; null: this is the last")


def described(model: Any, *, made: Any = None, etag: bool = False) -> dict[str, Any]:
    """Describe a route's answers, in the arguments of its decorator.

    Args:
        model: of status 200.
        made: of status 201; has an ETag.
        etag: whether the answer of status 200 has one.
    """
    described: dict[int | str, Any] = {200: {"model": model}}
    if etag:
        described[200]["headers"] = _ETAG
    if made is not None:
        described[201] = {"model": made, "description": "It is made", "headers": _ETAG}
    return {"response_model": None, "responses": described}
