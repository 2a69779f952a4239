"""`spin-server audit`: who changed what, when and why."""

import argparse

from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import Subparsers, add_command, read_whole_number
from spin_server.cli.admin_output import Object, print_json, print_table
from spin_server.cli.exit_codes import OK

_SHOWN_CHANGES = 3


def add_parser(commands: Subparsers) -> None:
    """Add the `audit` subcommand."""
    parser = add_command(commands, "audit", _run, "show who changed what and why, newest first")
    parser.add_argument("--limit", metavar="N", help="the newest N entries only")


def _run(args: argparse.Namespace) -> int:
    most = None if args.limit is None else read_whole_number("--limit", args.limit, least=1)
    with connect(args) as client:
        log = client.items("audit", most=most)
    if args.json:
        print_json(log)
        return OK
    columns = ("revision", "at", "actor", "action")
    rows = [[*(e[c] for c in columns), _changed(e["changes"]), e["reason"]] for e in log["items"]]
    print_table([[*map(str.upper, columns), "CHANGED", "REASON"], *rows])
    return OK


def _changed(changes: list[Object]) -> str:
    return shortened([f"{change['kind']} {change['name']}" for change in changes])


def shortened(names: list[str]) -> str:
    """Write the first names, and how many more there are."""
    more = len(names) - _SHOWN_CHANGES
    return ", ".join(names[:_SHOWN_CHANGES]) + (f" and {more} more" if more > 0 else "")
