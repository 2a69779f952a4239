"""What the commands of the admin API share: their options, and how their values are read."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from spin_server.cli.admin_client import DEFAULT_URL, AdminClient, Answer, printable
from spin_server.errors import InputError

Subparsers = Any  # argparse names the type privately

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_OPTIONS = {  # that may be taken for fields
    "canary": "--canary PERCENT",
    "canary_percent": "--canary PERCENT",
    "ttl": "--ttl TIME",
    "ttl_seconds": "--ttl TIME",
}
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


class MixedParser(argparse.ArgumentParser):
    """Takes options between positional arguments: NAME --description TEXT FIELD=VALUE."""

    _within = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """See `argparse`, which calls this for a subcommand; and once more from within."""
        if self._within:
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


def add_group(commands: Subparsers, name: str, purpose: str) -> Subparsers:
    """Add a command that only has subcommands."""
    parser = commands.add_parser(
        name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", allow_abbrev=False
    )
    return parser.add_subparsers(required=True, metavar="COMMAND", parser_class=MixedParser)


def add_command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], purpose: str
) -> argparse.ArgumentParser:
    """Add a command of the admin API, with the options that all of them have."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}. Exit status: 0; 2 for bad input or if "
        "the API refuses; 3 if the server does not answer or cannot do it now.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the admin API").add_argument
    add("--url", help=f"where it is (SPIN_ADMIN_URL, else {DEFAULT_URL})")
    add(
        "--key-file",
        metavar="FILE",
        help="holds the key (else SPIN_ADMIN_KEY holds it, or SPIN_ADMIN_KEY_FILE names a file)",
    )
    add(
        "--insecure",
        action="store_true",
        help="send the key over plain http to a host that is not loopback",
    )
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option of what is read by programs."""
    parser.add_argument("--json", action="store_true", help="print the answer as it is")


def add_reason(parser: argparse.ArgumentParser) -> None:
    """Add the option of every change."""
    parser.add_argument("--reason", metavar="TEXT", help="why; kept in the audit log")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option of the changes that can be tried."""
    parser.add_argument(
        "--dry-run",
        action="store_const",
        const="All",
        help="say what would change, and change nothing",
    )


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option of what cannot be undone."""
    parser.add_argument("--yes", action="store_true", help="do not ask")


def read_whole_number(name: str, text: str, least: int = 0) -> int:
    """Read a whole number.

    Raises:
        InputError: it is none, or less than `least`.
    """
    if not _WHOLE_NUMBER.fullmatch(text) or int(text) < least:
        raise InputError(name, f"a whole number, {least} or more", repr(text))
    return int(text)


def read_fields(words: Sequence[str]) -> dict[str, str | int | None]:
    """Read FIELD=VALUE; FIELD= takes a field back.

    The API knows which fields there are, but not this command's options. A whole number is sent as
    one, everything else as text: the API reads a share from its decimal digits, so 0.1 is exactly
    that.

    Raises:
        InputError: no equals sign, a field that comes twice, or what is an option's.
    """
    fields: dict[str, str | int | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise InputError("field", "FIELD=VALUE, or FIELD= to take it back", repr(word))
        if name in _OPTIONS:
            raise InputError(
                f"field {name}", f"{_OPTIONS[name]} beside the fields of `policy set`", repr(word)
            )
        if name in fields:
            raise InputError(f"field {printable(name)}", "one value", "two")
        fields[name] = int(value) if _WHOLE_NUMBER.fullmatch(value) else value or None
    return fields


def read_seconds(name: str, text: str) -> int:
    """Read a span of time: seconds, or 90s, 30m, 1h, 2d.

    Raises:
        InputError: it is none.
    """
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if found is None:
        raise InputError(name, "seconds, or a span such as 90s, 30m, 1h or 2d", repr(text))
    return int(found[1]) * _SECONDS[found[2]]


def read_moment(name: str, text: str) -> str:
    """Read a moment: a span of time from now, as `read_seconds`, or ISO 8601 with its time zone.

    Raises:
        InputError: it is neither.
    """
    try:
        if re.fullmatch(r"[0-9]{1,9}[smhd]?", text):
            moment = datetime.now(UTC) + timedelta(seconds=read_seconds(name, text))
        else:
            moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except OverflowError:
        raise InputError(name, "a time before the year 9999", repr(text)) from None
    except ValueError:
        expected = "a span such as 30d, or a time with its zone, such as 2030-12-31T23:59:59Z"
        raise InputError(name, expected, repr(text)) from None


def read_if_match(text: str) -> str:
    """Read a revision as an entity tag: 7, "7", or * for any.

    Raises:
        InputError: it is none.
    """
    found = re.fullmatch(r'\*|"?([0-9]{1,18})"?', text)
    if found is None:
        raise InputError("--if-match", "a revision such as 7, or * for any", repr(text))
    return f'"{found[1]}"' if found[1] else "*"


def read_first(client: AdminClient, *parts: str, instead: str = "") -> Answer:
    """Read what a change is to be based on.

    Args:
        instead: what a key that may not read can do.

    Raises:
        InputError: the API refuses it; that the change itself needs no reading is said.
    """
    try:
        return client.get(*parts)
    except InputError as error:
        if "the scope 'read'" not in str(error.got):
            raise
        got = f"{error.got}, for what is changed is read first{instead}"
        raise InputError(error.name, error.expected, got) from None


def confirm(command: str, question: str, *, yes: bool) -> None:
    """Ask before what cannot be undone.

    Args:
        command: what was called, for the error.
        yes: do not ask.

    Raises:
        InputError: the answer is no, or there is nobody to ask.
    """
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(command, "--yes, or a terminal to ask on", "neither; nothing was done")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if answer.lower() not in ("y", "yes"):
        raise InputError(command, "y", "another answer; nothing was done")
