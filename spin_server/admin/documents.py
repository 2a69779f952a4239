"""The documents that the store keeps, and what may be sent to change them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from spin_server.errors import InputError
from spin_server.policy.policy import BudgetMode, ExplorationPolicy, Policy
from spin_server.policy.ratio import Ratio

DEFAULT = "default"  # the policy of whoever has no other
NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_MOST_SHOWN = 65  # of what came: a name, in quotes


def came(value: object) -> str:
    """Say what came instead of what was expected.

    A text is whole or not shown at all: a key that was cut could not be blacked out any more.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | int | float):
        text = repr(value)
        return text if len(text) <= _MOST_SHOWN else f"one of {len(text):,} characters"
    return "an object" if isinstance(value, Mapping) else "a list"


def _check_share(value: object) -> object:
    """Refuse what is no share; true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a number from 0 to 1, got {came(value)}")
    try:
        Ratio.parse("share", value)
    except InputError as error:
        raise ValueError(f"expected {error.expected}, got {came(value)}") from None
    return value


# A decimal string keeps its digits.
Share = Annotated[
    str | int | float,
    PlainValidator(_check_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "string", "pattern": r"^[0-9.eE+-]{1,64}$"},
            ]
        }
    ),
]
Name = Annotated[
    str,
    Field(
        pattern=NAME_PATTERN,
        description="a DNS label: it becomes a metric's label and a Kubernetes key",
        examples=["search-team"],
    ),
]
Scope = Literal["read", "write", "keys", "audit"]
Timestamp = Annotated[str, AfterValidator(lambda text: timestamp(moment(text)))]

# Fields of features that do not exist yet: refused, never stored and ignored.
_UNBUILT = {
    "max_miss_rate": "guard rails",
    "min_sparsity": "guard rails",
    "max_sparsity": "guard rails",
    "guard_rails": "guard rails",
    "layer_budgets": "per-layer budgets",
}
_CANARY = ("canary", "canary_percent")
# Field of the API -> of `Policy`.
POLICY_FIELDS = {
    "target_sparsity": "sparsity",
    "exploration_share": "exploration",
    "exploration_policy": "exploration_policy",
    "budget": "budget",
    "probe_period": "probe_period",
    "ema_decay": "ema_decay",
}
SHARES = ("target_sparsity", "exploration_share", "ema_decay")
Fields = dict[str, Any]  # some of POLICY_FIELDS; a share is a decimal string


class PolicyPatch(BaseModel):
    """Fields of a policy to set; null takes one back to where it comes from otherwise."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    target_sparsity: Share | None = Field(
        default=None,
        description="share of blocks to skip, 0 to 1, at most 9 decimals",
        examples=[0.5],
    )
    exploration_share: Share | None = Field(
        default=None,
        description="share of the kept blocks that explores, 0 to 1",
        examples=[0.05],
    )
    exploration_policy: ExplorationPolicy | None = Field(
        default=None, description="which blocks to explore", examples=["random"]
    )
    budget: BudgetMode | None = Field(
        default=None, description="how the layers share the budget", examples=["uniform"]
    )
    probe_period: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="every how many steps one is dense; 0: never", examples=[0]
    )
    ema_decay: Share | None = Field(
        default=None,
        description="share of history that an observation keeps, 0 to 1",
        examples=[0.5],
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unbuilt(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for name in given:
                if name in _CANARY:
                    raise ValueError(f"{name}: expected ?canary_percent= beside the fields")
                if name in _UNBUILT:
                    raise ValueError(f"{name}: {_UNBUILT[name]} do not exist in this release")
                if name == "budget" and given[name] == "per_layer":
                    raise ValueError("budget: per-layer budgets do not exist in this release")
                if name not in POLICY_FIELDS:
                    raise ValueError(f"{name!r}: expected one of {', '.join(POLICY_FIELDS)}")
        return given

    def changes(self) -> Fields:
        """Get what was sent: a field's value as it is stored, or None to take it back."""
        return {name: _stored(name, getattr(self, name)) for name in self.model_fields_set}


def _stored(name: str, value: Any) -> Any:
    return _decimal(Ratio.parse(name, value)) if name in SHARES and value is not None else value


def _decimal(ratio: Ratio) -> str:
    """Write a share out, exactly and in one way: 0.3, 0.000002, 1."""
    return format(Decimal(ratio.billionths).scaleb(-9).normalize(), "f")


def shown(name: str, value: Any) -> Any:
    """Show a stored field: a share is a number."""
    return float(Ratio.parse(name, value)) if name in SHARES else value


def fields_of(policy: Policy) -> Fields:
    """Take a policy apart, as its fields are stored."""
    return {
        name: _decimal(value) if isinstance(value := getattr(policy, ours), Ratio) else value
        for name, ours in POLICY_FIELDS.items()
    }


def policy_of(fields: Fields) -> Policy:
    """Put a policy together from all of its fields.

    Raises:
        InputError: a value outside its domain.
    """
    return _policy_of(tuple(fields[name] for name in POLICY_FIELDS))


@lru_cache(maxsize=4096)  # thousands of tenants share a few policies
def _policy_of(given: tuple[Any, ...]) -> Policy:
    fields = dict(zip(POLICY_FIELDS, given, strict=True))
    values: dict[str, Any] = {
        ours: Ratio.parse(name, fields[name]) if name in SHARES else fields[name]
        for name, ours in POLICY_FIELDS.items()
    }
    return Policy(**values)


class Expiry(BaseModel):
    """When a policy's fields go back by themselves, and to what."""

    model_config = ConfigDict(extra="forbid")

    at: Timestamp
    restore: Fields


class Canary(BaseModel):
    """Fields that some of a policy's requests try before all of them get it."""

    model_config = ConfigDict(extra="forbid")

    percent: Annotated[StrictInt, Field(ge=1, le=99)]
    fields: Annotated[Fields, Field(min_length=1)]


class PolicyDocument(BaseModel):
    """What is set of a policy; everything else comes from elsewhere."""

    model_config = ConfigDict(extra="forbid")

    fields: Fields
    expires: Expiry | None = None
    canary: Canary | None = None

    @model_validator(mode="after")
    def _check(self) -> "PolicyDocument":
        restore = self.expires.restore if self.expires else {}
        for fields in (self.fields, restore, self.canary.fields if self.canary else {}):
            PolicyPatch.model_validate(fields)
            if None in fields.values():
                raise ValueError("expected values, got null, which stands for no field at all")
        return self

    def at(self, now: datetime) -> "PolicyDocument":
        """Get it without what was set until a time that has passed."""
        if self.expires is None or moment(self.expires.at) > now:
            return self
        return PolicyDocument(fields=self.expires.restore, canary=self.canary)


_Limit = Annotated[StrictInt, Field(ge=1, lt=2**53)] | None


class Limits(BaseModel):
    """What a tenant may have at once; null: no limit."""

    model_config = ConfigDict(extra="forbid")

    concurrent_requests: _Limit = Field(
        default=None, description="sequences that wait or run", examples=[32]
    )
    queued_tokens: _Limit = Field(
        default=None,
        description="prompt tokens of its requests that have no first token yet",
        examples=[2_000_000],
    )
    context_tokens: _Limit = Field(
        default=None, description="prompt and answer of one request", examples=[524_288]
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for name in given:
                if name not in cls.model_fields:
                    raise ValueError(f"expected one of {', '.join(cls.model_fields)}, got {name!r}")
        return given

    def patched(self, patch: "Limits") -> "Limits":
        """Take over what a merge patch names."""
        changes = {name: getattr(patch, name) for name in patch.model_fields_set}
        return self.model_copy(update=changes)


class TenantDocument(BaseModel):
    """A tenant."""

    model_config = ConfigDict(extra="forbid")

    description: str
    created_at: Timestamp
    limits: Limits = Limits()


class KeyDocument(BaseModel):
    """A key, without the key: its hash and its first characters."""

    model_config = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    prefix: str
    tenant: Name | None
    scopes: list[Scope]
    description: str
    created_at: Timestamp
    expires_at: Timestamp | None
    replaced_by: str | None = None  # id of the key that took its place

    def ended(self, now: datetime) -> bool:
        """Say whether it is refused from now on."""
        return self.expires_at is not None and moment(self.expires_at) <= now


DOCUMENTS: dict[str, type[BaseModel]] = {
    "policy": PolicyDocument,
    "tenant": TenantDocument,
    "key": KeyDocument,
}


def timestamp(moment: datetime) -> Timestamp:
    """Write a moment as it is stored: UTC, to the second."""
    try:
        found = moment.astimezone(UTC)
    except OverflowError:
        raise InputError("time", "one in the years 1 to 9999 in UTC", moment) from None
    return found.replace(microsecond=0, tzinfo=None).isoformat() + "Z"


def moment(text: Timestamp) -> datetime:
    """Read a timestamp.

    Raises:
        InputError: it is none, or has no time zone.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InputError("time", "ISO 8601, such as 2026-12-31T23:59:59Z", repr(text)) from None
    if found.tzinfo is None:
        raise InputError("time", "a time zone, such as Z", repr(text))
    return found
