"""`spin-server replay`: SPIN over recorded scores."""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from spin_server.algorithm.options import (
    HistoryType,
    MaskSharing,
    Pooling,
    SpinOptions,
    UpdateRule,
    Variant,
)
from spin_server.errors import InputError
from spin_server.policy.policy import (
    DEFAULT_EMA_DECAY,
    DEFAULT_EXPLORATION,
    DEFAULT_SPARSITY,
    EXPLORATION_POLICIES,
    Policy,
)
from spin_server.policy.ratio import Ratio

# Far above any context, and far below where int64 arithmetic or a table's width overflows.
_LARGEST = 2**20
Subparsers = Any  # argparse names the type privately


def add_parser(commands: Subparsers) -> None:
    """Add the `replay` subcommand."""
    parser = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="replay SPIN over recorded indexer scores",
        description="Replay SPIN over a trace of dense indexer scores (docs/replay.md).",
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.npz")
    add(
        "--sparsity",
        default=str(DEFAULT_SPARSITY),
        metavar="R",
        help="target share of blocks to skip (0.3)",
    )
    add(
        "--exploration",
        metavar="G",
        help="share of the kept budget that explores (0.05; 0 with A0, which does not explore)",
    )
    add("--policy", default="random", choices=EXPLORATION_POLICIES, help="whom to explore")
    add("--pooling", default="max", choices=get_args(Pooling), help="slots to block score")
    add("--variant", default="A1", choices=get_args(Variant), help="ablation (A1)")
    add("--ema-decay", default=str(DEFAULT_EMA_DECAY), metavar="A", help="weight of history (0.5)")
    add("--history", default="float32", choices=get_args(HistoryType), help="how it is stored")
    add("--block-size", type=int, default=64, metavar="B", help="slots per block (64)")
    add("--top-k", type=int, default=512, metavar="K", help="the indexer's top-K (512)")
    add("--seed", type=int, default=0, metavar="S", help="of random exploration (0)")
    add("--mask", default="union", choices=get_args(MaskSharing), help="under speculation")
    add("--update", default="prefix", choices=get_args(UpdateRule), help="under speculation")
    add(
        "--budgets",
        type=Path,
        metavar="BUDGETS.json",
        help="null, or a list of one block budget per step instead of ceil((1 - R) * blocks)",
    )
    add("--probe-period", type=int, metavar="P", help="every P-th step since a reset is dense")
    add("--out", type=Path, metavar="RESULT.json", help="where to write (standard output)")
    parser.set_defaults(run=run)


def _read_budgets(path: Path) -> list[int] | None:
    expected = "null or a list of whole numbers, 0 or more"
    try:
        budgets = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"--budgets {path}", "a readable file", error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--budgets {path}", expected, f"no JSON ({error})") from None
    if budgets is None:
        return None
    if not isinstance(budgets, list):
        raise InputError(f"--budgets {path}", expected, type(budgets).__name__)
    for step, budget in enumerate(budgets):
        # 2**53: no context has more blocks, and int64 arithmetic stays exact.
        if type(budget) is not int or not 0 <= budget <= 2**53:
            raise InputError(f"--budgets {path}", expected, f"{budget!r} at step {step}")
    return budgets


def _write(path: Path | None, text: str) -> None:
    """Write the whole result or nothing; devices, pipes and links are written through."""
    if path is None:
        sys.stdout.write(text)
        return
    partial: Path | None = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            target.write_text(text)
            return
        partial = target.with_name(f".spin-{os.getpid()}.partial")
        partial.write_text(text)
        partial.replace(target)
    except (OSError, ValueError) as error:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--out {path}", "a writable file", reason) from None


def run(args: argparse.Namespace) -> int:
    """Replay a trace and write the result as JSON."""
    from spin_server.replay.report import build_report
    from spin_server.replay.runner import replay
    from spin_server.replay.trace import load_trace

    if args.probe_period is not None and args.probe_period < 1:
        raise InputError("--probe-period", "at least 1", args.probe_period)
    for name in ("block_size", "top_k", "probe_period"):
        if (getattr(args, name) or 0) > _LARGEST:
            option = f"--{name.replace('_', '-')}"
            raise InputError(option, f"at most {_LARGEST}", getattr(args, name))
    if args.exploration is None:
        args.exploration = "0" if args.variant == "A0" else str(DEFAULT_EXPLORATION)
    policy = Policy(
        sparsity=Ratio.parse("--sparsity", args.sparsity),
        exploration=Ratio.parse("--exploration", args.exploration),
        exploration_policy=args.policy,
        ema_decay=Ratio.parse("--ema-decay", args.ema_decay),
        probe_period=args.probe_period or 0,
    )
    options = SpinOptions(
        block_size=args.block_size,
        top_k=args.top_k,
        variant=args.variant,
        pooling=args.pooling,
        mask_sharing=args.mask,
        update_rule=args.update,
        seed=args.seed,
        history=args.history,
    )
    budgets = _read_budgets(args.budgets) if args.budgets else None
    trace = load_trace(args.trace)
    records = replay(trace, options, policy, budgets)
    report = build_report(
        records,
        policy,
        {
            "sparsity": float(policy.sparsity),
            "exploration": float(policy.exploration),
            "policy": args.policy,
            "pooling": args.pooling,
            "variant": args.variant,
            "ema_decay": float(policy.ema_decay),
            "history": args.history,
            "block_size": args.block_size,
            "top_k": args.top_k,
            "seed": args.seed,
            "mask": args.mask,
            "update": args.update,
            "budgets": budgets,
            "probe_period": args.probe_period,
        },
        trace.layers.tolist() if trace.multi_layer else None,
    )
    _write(args.out, json.dumps(report, allow_nan=False) + "\n")
    if args.out is not None:
        print(_summary(report))
    return 0


def _summary(report: dict[str, Any]) -> str:
    """One line for people; a mean over nothing is a dash."""
    names = ("mean_miss", "p99_miss", "realized_sparsity", "effective_sparsity", "target_sparsity")
    values = ((name, report[name]) for name in names)
    return ", ".join(f"{n} {'-' if v is None else f'{v:.4f}'}" for n, v in values)
