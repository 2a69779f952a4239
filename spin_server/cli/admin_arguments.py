"""The `--admin-*` arguments of `spin-server serve`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from spin_server.admin.location import check_location
from spin_server.errors import InputError

DEFAULT_PORT = 8081


@dataclass(frozen=True, slots=True)
class AdminArguments:
    """Where the admin API keeps its documents, and where it listens."""

    store: str
    host: str
    port: int


def read_admin_arguments(argv: Sequence[str]) -> tuple[AdminArguments | None, list[str]]:
    """Take the `--admin-*` arguments out of a command line.

    Returns:
        None if no store is named: then there is no admin API; and what is left.

    Raises:
        InputError: an argument that does not make sense.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--admin-store")
    parser.add_argument("--admin-host")
    parser.add_argument("--admin-port", type=int)
    try:
        ours, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("serve", "the admin API's arguments", error) from None
    for argument in rest:
        if argument.startswith("--admin-"):
            raise InputError("serve", "one of the admin API's arguments (see --help)", argument)
    if ours.admin_store is None:
        if ours.admin_host is not None or ours.admin_port is not None:
            raise InputError("serve", "--admin-store beside --admin-host and -port", "none")
        return None, rest
    check_location(ours.admin_store)
    port = DEFAULT_PORT if ours.admin_port is None else ours.admin_port
    if not 0 <= port < 65536:
        raise InputError("--admin-port", "0 (any) to 65535", port)
    return AdminArguments(ours.admin_store, ours.admin_host or "127.0.0.1", port), rest
