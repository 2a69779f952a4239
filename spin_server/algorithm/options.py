"""The choices that hold for a whole run; those of a request are its policy."""

from dataclasses import dataclass
from typing import Literal, get_args

from spin_server.errors import InputError

Variant = Literal["A1", "A0", "A2"]
Pooling = Literal["max", "top4", "mean"]
MaskSharing = Literal["union", "row0"]
UpdateRule = Literal["prefix", "row0"]
HistoryType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class SpinOptions:
    """The choices that every request of a run shares.

    Args:
        block_size: slots per block (64: one page of the indexer's KV cache).
        top_k: K of the indexer's own top-K (512 in DeepSeek-V4, 2048 in V3.2).
        variant: A1 predicts slots and pools them into blocks; A0 picks slots and expands them to
            blocks; A2 pools scores first and keeps histories of blocks.
        pooling: how slots become a block score: max, top4 or mean.
        mask_sharing: under speculation, the union of all rows' blocks or row 0's alone.
        update_rule: under speculation, replay the accepted prefix or row 0 alone.
        seed: of the random exploration.
        history: how V and D are stored; bfloat16 takes half the memory, and rounds every update.

    Raises:
        InputError: a value outside its domain.
    """

    block_size: int = 64
    top_k: int = 512
    variant: Variant = "A1"
    pooling: Pooling = "max"
    mask_sharing: MaskSharing = "union"
    update_rule: UpdateRule = "prefix"
    seed: int = 0
    history: HistoryType = "float32"

    def __post_init__(self) -> None:
        for name, domain in (
            ("variant", Variant),
            ("pooling", Pooling),
            ("mask_sharing", MaskSharing),
            ("update_rule", UpdateRule),
            ("history", HistoryType),
        ):
            if getattr(self, name) not in get_args(domain):
                raise InputError(name, f"one of {', '.join(get_args(domain))}", getattr(self, name))
        for name in ("block_size", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(name, "at least 1", getattr(self, name))
