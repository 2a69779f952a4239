"""`spin-server serve`: vLLM's OpenAI server, with its own arguments."""

import argparse
from collections.abc import Sequence
from typing import Any

from spin_server.cli.exit_codes import ENGINE_DIED, OK
from spin_server.errors import InputError

Subparsers = Any  # argparse names the type privately

_USAGE = "spin-server serve MODEL [vLLM's own arguments]"
_HELP = f"""usage: {_USAGE}

Serve MODEL, a folder or a name OWNER/NAME, with vLLM's OpenAI server.

Every argument after MODEL is vLLM's own and passed on unchanged; --help=all lists them. What
differs from `vllm serve`: it listens on 127.0.0.1 unless --host says otherwise, and on a CPU
--enforce-eager and --enable-prompt-tokens-details are on.

exit status: 0 after SIGINT or SIGTERM, 1 if the engine died, 2 for a wrong argument,
3 if the server could not start
"""


def add_parser(commands: Subparsers) -> None:
    """Add the `serve` subcommand to the help; `main` does its own parsing."""
    commands.add_parser("serve", add_help=False, help="serve a model: vLLM's own arguments")


def main(argv: Sequence[str]) -> int:
    """Serve a model.

    Raises:
        SpinError: what cannot be served, with the reason.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return OK
    model, rest = argv[0], list(argv[1:])
    if model.startswith("-") and not model.startswith("--help="):
        raise InputError("serve", f"MODEL first: {_USAGE}", model)

    from spin_server.engine import preflight
    from spin_server.engine.model_support import indexer_geometry, read_local_config
    from spin_server.engine.versions import installed_vllm

    installed_vllm()
    if model.startswith("--help="):
        return _vllm_help(model)
    config = read_local_config(model)
    # A folder is judged at once; a name only when vLLM has looked it up.
    if config is not None and "--hf-overrides" not in rest:
        indexer_geometry(config)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--host", default="127.0.0.1")
    early.add_argument("--port", type=int, default=8000)
    early.add_argument("--uds")
    try:
        address, _ = early.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise InputError("serve", "vLLM's own arguments", error) from None
    if address.uds is None:
        preflight.check_port(address.host, address.port)

    from spin_server.engine.server import serve

    return OK if serve(model, rest) else ENGINE_DIED


def _vllm_help(flag: str) -> int:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser(prog="spin-server serve MODEL")).parse_args([flag])
    return OK
