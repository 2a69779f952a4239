"""`spin-server audit` and `spin-server revisions`: who changed what, when and why."""

import argparse
from functools import partial

from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import Subparsers, add_command, read_whole_number
from spin_server.cli.admin_output import Object, print_json, print_table
from spin_server.cli.exit_codes import OK

_SHOWN_NAMES = 3


def add_parser(commands: Subparsers) -> None:
    """Add the `revisions` and `audit` subcommands."""
    for name, purpose in (
        ("revisions", "list what `policy diff` and `revert` may name, newest first"),
        ("audit", "show who changed what and why, newest first"),
    ):
        parser = add_command(commands, name, partial(_run, name), purpose)
        parser.add_argument("--limit", metavar="N", help="the newest N only")


def _run(route: str, args: argparse.Namespace) -> int:
    most = None if args.limit is None else read_whole_number("--limit", args.limit, least=1)
    with connect(args) as client:
        found = client.items(route, most=most)
    if args.json:
        print_json(found)
        return OK
    columns = ("revision", "at", "actor", "action")
    rows = [[*(e[c] for c in columns), _changed(e), e["reason"]] for e in found["items"]]
    print_table([[*map(str.upper, columns), "CHANGED", "REASON"], *rows])
    return OK


def _changed(entry: Object) -> str:
    if "changed" in entry:  # of the revisions
        names = entry["changed"]
    else:
        names = [f"{change['kind']} {change['name']}" for change in entry["changes"]]
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
