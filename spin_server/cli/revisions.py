"""`spin-server revisions`: what can be compared, and gone back to."""

import argparse

from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import Subparsers, add_command, read_whole_number
from spin_server.cli.admin_output import print_json, print_table
from spin_server.cli.audit import shortened
from spin_server.cli.exit_codes import OK


def add_parser(commands: Subparsers) -> None:
    """Add the `revisions` subcommand."""
    purpose = "list the revisions, for `policy diff` and `revert`, newest first"
    parser = add_command(commands, "revisions", _run, purpose)
    parser.add_argument("--limit", metavar="N", help="the newest N only")


def _run(args: argparse.Namespace) -> int:
    most = None if args.limit is None else read_whole_number("--limit", args.limit, least=1)
    with connect(args) as client:
        found = client.items("revisions", most=most)
    if args.json:
        print_json(found)
        return OK
    columns = ("revision", "at", "actor", "action")
    rows = [
        [*(r[c] for c in columns), shortened(r["changed"]), r["reason"]] for r in found["items"]
    ]
    print_table([[*map(str.upper, columns), "CHANGED", "REASON"], *rows])
    return OK
