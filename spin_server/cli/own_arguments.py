"""Our arguments among vLLM's own on one command line."""

import argparse
from collections.abc import Sequence

from spin_server.errors import InputError


def own_parser() -> argparse.ArgumentParser:
    """Make a parser that leaves alone what it does not know."""
    return argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)


def take_own(
    parser: argparse.ArgumentParser, argv: Sequence[str], prefix: str, whose: str
) -> tuple[argparse.Namespace, list[str]]:
    """Take what begins with a prefix out of a command line.

    Args:
        parser: knows all of it.
        prefix: such as `--spin-`.
        whose: for the message.

    Returns:
        What was taken, and what is left.

    Raises:
        InputError: an argument that is wrong, or that the parser does not know.
    """
    try:
        ours, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("serve", f"{whose} arguments", error) from None
    for argument in rest:
        if argument.startswith(prefix):
            raise InputError("serve", f"one of {whose} arguments (see --help)", argument)
    return ours, rest
