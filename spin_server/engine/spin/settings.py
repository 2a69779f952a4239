"""What the launcher tells every process of the engine about SPIN.

It travels in vLLM's own configuration (`--additional-config`, key `spin`), which reaches every
worker on every host; what belongs to one request travels in its sampling parameters.
"""

import hashlib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from spin_server.algorithm.options import HistoryType, MaskSharing, UpdateRule
from spin_server.policy.policy import (
    DEFAULT_EMA_DECAY,
    DEFAULT_EXPLORATION,
    DEFAULT_SPARSITY,
    BudgetMode,
    ExplorationPolicy,
    Policy,
)
from spin_server.policy.ratio import Ratio

CONFIG_KEY = "spin"
POLICY_ARGUMENT = "spin_policy"
DEFAULT_CAPACITY = 1024


# A decimal string keeps its digits; true and false are no numbers.
Share = StrictStr | StrictInt | StrictFloat
# Names become labels, arguments and YAML keys.
PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_MOST_STEPS = 2**31 - 1
_MOST_POLICIES = 2**16


class PolicySettings(BaseModel):
    """One policy, as it is written in YAML or JSON."""

    model_config = ConfigDict(extra="forbid")

    sparsity: Share = Field(
        default=str(DEFAULT_SPARSITY), description="target share of blocks to skip, 0 to 1"
    )
    exploration: Share = Field(
        default=str(DEFAULT_EXPLORATION),
        description="share of the kept budget that explores, 0 to 1",
    )
    exploration_policy: ExplorationPolicy = Field(
        default="random", description="which blocks to explore"
    )
    ema_decay: Share = Field(
        default=str(DEFAULT_EMA_DECAY),
        description="share of history that an observation keeps, 0 to 1",
    )
    budget: BudgetMode = Field(default="uniform", description="how layers share the budget")
    probe_period: StrictInt = Field(
        default=0, ge=0, le=_MOST_STEPS, description="every how many steps one is dense; 0: never"
    )

    def policy(self) -> Policy:
        """Check the numbers exactly.

        Raises:
            InputError: a share outside 0..1 or with too many decimals.
        """
        return Policy(
            sparsity=Ratio.parse("sparsity", self.sparsity),
            exploration=Ratio.parse("exploration", self.exploration),
            exploration_policy=self.exploration_policy,
            ema_decay=Ratio.parse("ema_decay", self.ema_decay),
            budget=self.budget,
            probe_period=self.probe_period,
        )


class RecordSettings(BaseModel):
    """What to record, and how much at most."""

    model_config = ConfigDict(extra="forbid")

    folder: str = Field(min_length=1, description="where traces are written, one file per request")
    layers: list[int] = Field(default=[], description="layers to record; none means all")
    requests: int = Field(default=16, ge=1, description="requests to record")
    steps: int = Field(default=256, ge=1, description="decode steps of each request")
    bytes: int = Field(default=2**30, ge=1, description="of scores in memory and files, in all")


class SpinSettings(BaseModel):
    """SPIN's part of the engine's configuration."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(default=True, description="whether the indexer is narrowed at all")
    default: PolicySettings = Field(default=PolicySettings(), description="policy 0")
    policies: dict[PolicyName, PolicySettings] = Field(
        default={}, description="named policies; ids 1, 2, … in this order"
    )
    capacity: int = Field(
        default=DEFAULT_CAPACITY, ge=1, le=_MOST_POLICIES, description="rows of the policy table"
    )
    places: int | None = Field(
        default=None,
        ge=1,
        description="histories held at once; none: one for each request that may run",
    )
    min_context: int | None = Field(
        default=None,
        ge=0,
        description="contexts of no more tokens are scored densely; none: by the device",
    )
    history: HistoryType = Field(default="float32", description="how histories are stored")
    mask: MaskSharing = Field(
        default="union", description="under speculation: whose blocks a request's rows score"
    )
    update: UpdateRule = Field(
        default="prefix", description="under speculation: which rows' scores are learnt"
    )
    seed: int = Field(default=0, description="of random exploration")
    record: RecordSettings | None = Field(default=None, description="traces to write")
    allow_request_policy: bool = Field(
        default=False, description="whether a client may name its policy"
    )


def num_places(settings: SpinSettings, max_num_seqs: int) -> int:
    """How many histories a worker holds, for at most `max_num_seqs` requests at once."""
    return min(settings.places or max_num_seqs, max_num_seqs)


def read_settings(vllm_config: Any) -> SpinSettings:
    """Read the settings that the launcher wrote; absent means SPIN is off."""
    found = (vllm_config.additional_config or {}).get(CONFIG_KEY)
    return SpinSettings(enabled=False) if found is None else SpinSettings.model_validate(found)


def request_identity(request_id: str, sampling_params: Any) -> tuple[int, int]:
    """Find a request's policy id, and its 64-bit key as a signed number.

    The key is a hash of the id that the engine gave the request, the same on every rank.
    """
    extra = (sampling_params.extra_args if sampling_params is not None else None) or {}
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int(extra.get(POLICY_ARGUMENT, 0)), int.from_bytes(digest, "little", signed=True)
