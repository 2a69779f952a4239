"""The `--admin-*` arguments of `spin-server serve`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from spin_server.admin.location import check_location
from spin_server.cli.own_arguments import own_parser, take_own
from spin_server.errors import InputError

DEFAULT_PORT = 8081


@dataclass(frozen=True, slots=True)
class AdminArguments:
    """Where the admin API keeps its documents, and where it listens."""

    store: str
    host: str
    port: int


def take_admin_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the `--admin-*` arguments out of a command line, whatever they ask for.

    Returns:
        These arguments, and what is left.

    Raises:
        InputError: an argument that does not exist, or a value of another type.
    """
    parser = own_parser()
    parser.add_argument("--admin-store")
    parser.add_argument("--admin-host")
    parser.add_argument("--admin-port", type=int)
    return take_own(parser, argv, "--admin-", "the admin API's")


def read_admin_arguments(argv: Sequence[str]) -> tuple[AdminArguments | None, list[str]]:
    """Take the `--admin-*` arguments out of a command line.

    Returns:
        None if no store is named: then there is no admin API; and what is left.

    Raises:
        InputError: an argument that does not make sense.
    """
    ours, rest = take_admin_arguments(argv)
    if ours.admin_store is None:
        if ours.admin_host is not None or ours.admin_port is not None:
            raise InputError("serve", "--admin-store beside --admin-host and -port", "none")
        return None, rest
    check_location(ours.admin_store)
    port = DEFAULT_PORT if ours.admin_port is None else ours.admin_port
    if not 0 <= port < 65536:
        raise InputError("--admin-port", "0 (any) to 65535", port)
    return AdminArguments(ours.admin_store, ours.admin_host or "127.0.0.1", port), rest
