"""`spin-server bulk`: several changes in one revision, all of them or none."""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import Subparsers, add_command, add_dry_run, add_reason
from spin_server.cli.admin_output import (
    applied_to,
    print_changes,
    print_plainly,
    print_prefix_cache,
    print_warnings,
    require_applied,
)
from spin_server.cli.exit_codes import OK
from spin_server.errors import InputError

_MOST_BYTES = 2**20


def add_parser(commands: Subparsers) -> None:
    """Add the `bulk` subcommand."""
    parser = add_command(commands, "bulk", _run, "make several changes at once: all, or none")
    parser.add_argument(
        "file", metavar="FILE", help='JSON, as for POST /v1/bulk: {"operations": [...]}; -: input'
    )
    add_dry_run(parser)
    add_reason(parser)


def _read(name: str) -> dict[str, Any]:
    shown = "standard input" if name == "-" else name
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            read = file.read(_MOST_BYTES + 1)  # it may be a device
        text = read.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("FILE", "a file in UTF-8", f"{shown}: {error}") from None
    if len(read) > _MOST_BYTES:
        raise InputError(shown, f"at most {_MOST_BYTES:,} bytes, as the API takes", "more")
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputError(shown, "JSON", error) from None
    if not isinstance(found, dict):
        raise InputError(shown, 'an object: {"operations": [...]}', type(found).__name__)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a member that comes twice: the API would, and this would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"member {twice!r} comes twice")
    return found


def _run(args: argparse.Namespace) -> int:
    wanted = _read(args.file)
    with connect(args) as client:
        answer = client.send(
            "POST", "bulk", body=wanted, query={"dryRun": args.dry_run, "reason": args.reason}
        ).body
    if not print_plainly(args, answer):
        print_changes(answer["changes"])
        print_prefix_cache(answer)
        print_warnings(answer)
        done = f"revision {answer['revision']}, {applied_to(answer['applied'])}"
        print(done if answer["changes"] else "nothing changes")
    require_applied(answer)
    return OK
