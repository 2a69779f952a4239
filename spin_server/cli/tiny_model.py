"""`spin-server tiny-model`: a small model of DeepSeek-V4's architecture."""

import argparse
from pathlib import Path
from typing import Any

from spin_server.errors import InputError

Subparsers = Any  # argparse names the type privately


def add_parser(commands: Subparsers) -> None:
    """Add the `tiny-model` subcommand."""
    parser = commands.add_parser(
        "tiny-model",
        allow_abbrev=False,
        help="write a tiny DeepSeek-V4 with random weights",
        description="Write a tiny model of DeepSeek-V4's architecture with seeded random weights.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="replace an entry of config.json, such as index_n_heads=64; may be repeated",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the model, unless it is there already."""
    from spin_server.tiny_model.checkpoint import write_checkpoint
    from spin_server.tiny_model.config import parse_override, tiny_config

    if not 0 <= args.seed < 2**63:
        raise InputError("--seed", "0 to 2**63 - 1", args.seed)
    config = tiny_config(dict(parse_override(text) for text in args.set))
    written = write_checkpoint(args.folder, config, args.seed)
    print(f"{args.folder}: {'written' if written else 'already there'}")
    return 0
