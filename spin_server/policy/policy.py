"""The choices that may differ from request to request."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from spin_server.errors import InputError
from spin_server.policy.ratio import Ratio

DEFAULT = "default"  # name of the policy of whoever has no other
ExplorationPolicy = Literal["random", "block_age", "staleness", "none"]
BudgetMode = Literal["uniform"]

EXPLORATION_POLICIES: tuple[ExplorationPolicy, ...] = get_args(ExplorationPolicy)
BUDGET_MODES: tuple[BudgetMode, ...] = get_args(BudgetMode)
DEFAULT_SPARSITY = Ratio.parse("sparsity", "0.30")
DEFAULT_EXPLORATION = Ratio.parse("exploration", "0.05")
DEFAULT_EMA_DECAY = Ratio.parse("ema_decay", "0.5")


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy.

    Args:
        sparsity: target share of blocks to skip.
        exploration: share of the kept budget spent on blocks outside the top-ranked set.
        exploration_policy: which of those blocks to take.
        ema_decay: share of history that an observation keeps, 0..1.
        budget: how the layers share the budget.
        probe_period: every how many steps since a reset one step is dense; 0 for never.

    Raises:
        InputError: a value outside its domain.
    """

    sparsity: Ratio = DEFAULT_SPARSITY
    exploration: Ratio = DEFAULT_EXPLORATION
    exploration_policy: ExplorationPolicy = "random"
    ema_decay: Ratio = DEFAULT_EMA_DECAY
    budget: BudgetMode = "uniform"
    probe_period: int = 0

    @property
    def keeps_all(self) -> bool:
        """Whether it skips no block: what is decoded under it is what the model would decode."""
        return self.sparsity.billionths == 0

    def pack(self) -> list[int | str]:
        """Take it apart into plain values, in the order of the fields; shares in billionths."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value.billionths if isinstance(value, Ratio) else value for value in values]

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> "Policy":
        """Put one together again.

        Raises:
            InputError: not what `pack` makes.
        """
        if len(values) != len(fields(cls)):
            raise InputError("a packed policy", f"{len(fields(cls))} values", len(values))
        sparsity, exploration, kind, decay, budget, probe_period = values
        return cls(Ratio(sparsity), Ratio(exploration), kind, Ratio(decay), budget, probe_period)

    def __post_init__(self) -> None:
        if self.exploration_policy not in EXPLORATION_POLICIES:
            raise InputError(
                "exploration_policy",
                f"one of {', '.join(EXPLORATION_POLICIES)}",
                self.exploration_policy,
            )
        if self.budget not in BUDGET_MODES:
            raise InputError("budget", f"one of {', '.join(BUDGET_MODES)}", self.budget)
        if self.probe_period < 0:
            raise InputError("probe_period", "0 (never) or more", self.probe_period)
