"""`spin-server profiles`: what `spin-server serve --profile` knows by name."""

import argparse
import shlex
from typing import Any

from spin_server.cli.exit_codes import OK

Subparsers = Any  # argparse names the type privately


def add_parser(commands: Subparsers) -> None:
    """Add the `profiles` subcommand."""
    parser = commands.add_parser(
        "profiles",
        help="list the profiles of `serve --profile`, or show one",
        description="List the profiles of `spin-server serve --profile`.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_list)
    actions = parser.add_subparsers(metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print the command line that a profile stands for",
        description="Print the command line that a profile stands for.",
        allow_abbrev=False,
    )
    show.add_argument("name", metavar="NAME|FILE.yaml")
    show.set_defaults(run=_show)


def _list(args: argparse.Namespace) -> int:
    from spin_server.profiles.profile import profile_names, read_profile

    names = profile_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {read_profile(name).description}")
    return OK


def _show(args: argparse.Namespace) -> int:
    from spin_server.profiles.profile import read_profile

    lines = ["spin-server serve MODEL"]
    for part in read_profile(args.name).arguments:
        if part.startswith("--"):
            lines.append(f"    {shlex.quote(part)}")
        else:  # one more value of the argument before it
            lines[-1] += f" {shlex.quote(part)}"
    print(" \\\n".join(lines))
    return OK
