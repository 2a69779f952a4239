"""The `spin-server` command."""

import argparse
import logging
import sys
from collections.abc import Sequence

from spin_server import __version__
from spin_server.cli import (
    bulk,
    doctor,
    history,
    key,
    policy,
    profiles,
    replay,
    serve,
    status,
    tenant,
    tiny_model,
)
from spin_server.cli.exit_codes import BAD_INPUT, START_FAILED
from spin_server.cli.standard_output import written_out
from spin_server.errors import InputError, SpinError


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand adds its own."""
    parser = argparse.ArgumentParser(
        prog="spin-server",
        description="vLLM with SPIN, the Shadow Predictive Indexer.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"spin-server {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, profiles, doctor, status, policy, tenant, key, bulk, history):
        module.add_parser(commands)
    for module in (replay, tiny_model):
        module.add_parser(commands)
    return parser


def _configure_logging() -> None:
    """Log our own messages to standard error; vLLM configures its own logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("spin-server: %(message)s"))
    ours = logging.getLogger("spin_server")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a deliberate error becomes one line on standard error.

    Returns:
        The exit status: see `spin_server.cli.exit_codes`.
    """
    _configure_logging()
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    try:
        if argv[:1] == ["serve"]:
            return serve.main(argv[1:])
        with written_out():
            args = parser.parse_args(argv)
            code: int = args.run(args)
            return code
    except SpinError as error:
        print(f"spin-server: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, InputError) else START_FAILED
