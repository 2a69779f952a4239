"""`spin-server serve`: vLLM's OpenAI server, with its own arguments."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spin_server.cli.exit_codes import ENGINE_DIED, OK
from spin_server.cli.own_arguments import own_parser
from spin_server.errors import InputError

if TYPE_CHECKING:  # it needs pydantic, which other commands do without
    from spin_server.profiles.profile import Profile

logger = logging.getLogger(__name__)

Subparsers = Any  # argparse names the type privately

_USAGE = "spin-server serve MODEL [vLLM's own arguments]"
_HELP = f"""usage: {_USAGE}

Serve MODEL, a folder or a name OWNER/NAME, with vLLM's OpenAI server.

Arguments after MODEL are SPIN's own (below) and vLLM's, passed on unchanged; --help=all lists
those. What differs from `vllm serve`: it listens on 127.0.0.1 unless --host says otherwise, and on
a CPU --enforce-eager and --enable-prompt-tokens-details are on.

  --profile NAME|FILE.yaml    arguments for a machine, from a file (docs/profiles.md); what the
                              command line says wins; `spin-server profiles` lists the names

exit status: 0 after SIGINT or SIGTERM, 1 if the engine died, 2 for a wrong argument,
3 if the server could not start

SPIN's own arguments:
  --spin-sparsity R           target share of blocks to skip (0.3)
  --spin-exploration G        share of the kept budget that explores (0.05)
  --spin-exploration-policy P random, block_age, staleness or none (random)
  --spin-ema-decay A          share of history that an observation keeps (0.5)
  --spin-probe-period P       every how many steps one is dense (0: never)
  --spin-policies FILE.yaml   named policies
  --spin-allow-request-policy a client may name its policy (vllm_xargs)
  --spin-record FOLDER        record traces; --spin-record-layers, -requests, -steps, -bytes
  --spin-capacity N           rows of the policy table (1024)
  --spin-places N             histories held at once (one for each request that may run)
  --spin-min-context T        contexts of no more tokens are scored densely (CPU 0, GPU 131072)
  --spin-history TYPE         how histories are stored: float32, or bfloat16 in half the memory
  --spin-mask RULE            under speculation, score all rows' blocks (union), or row0's
  --spin-update RULE          under speculation, learn from accepted rows (prefix), or row0 alone
  --spin-seed S               of random exploration (0)
  --spin-off                  the unmodified indexer

The admin API's (docs/admin.md):
  --admin-store FILE          keep policies, tenants and keys here, or in kubernetes://NAMESPACE/NAME;
                              without, there is no admin API
  --admin-port P              where it listens (8081)
  --admin-host H              and on which address (127.0.0.1)
"""


def add_parser(commands: Subparsers) -> None:
    """Add the `serve` subcommand to the help; `main` does its own parsing."""
    commands.add_parser("serve", add_help=False, help="serve a model: vLLM's own arguments")


def main(argv: Sequence[str]) -> int:
    """Serve a model.

    Raises:
        SpinError: what cannot be served, with the reason.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return OK
    if not argv or (argv[0].startswith("-") and not argv[0].startswith("--help=")):
        raise InputError("serve", f"MODEL first: {_USAGE}", argv[0] if argv else "nothing")
    model = argv[0]
    profile, given = _read_profile_argument(argv[1:])

    from spin_server.engine.lifetime import stop_on_signals_during_start

    stop_on_signals_during_start()  # before the imports, which take seconds
    from spin_server.cli.admin_arguments import read_admin_arguments
    from spin_server.cli.spin_arguments import read_spin_arguments
    from spin_server.engine.versions import installed_vllm

    installed_vllm()
    vllms = None
    if profile is not None:
        vllms = _for_vllm(profile)
        given = [*profile.arguments, *given]
        logger.info("profile %s: %s", profile.name, " ".join(profile.arguments))
    settings, rest = read_spin_arguments(given)
    admin, rest = read_admin_arguments(rest)
    if admin is not None and not settings.enabled:
        raise InputError("serve", "SPIN to be on, beside --admin-store", "--spin-off")
    if model.startswith("--help="):
        return _vllm_help(model)
    _refuse_early(model, rest, None if admin is None else admin.port)

    guest = None
    if admin is not None:
        from spin_server.cli.admin_guest import AdminGuest

        guest = AdminGuest(admin, settings.default.policy())

    from spin_server.engine.server import serve

    return OK if serve(model, rest, settings, guest, profile=vllms) else ENGINE_DIED


def _read_profile_argument(argv: Sequence[str]) -> "tuple[Profile | None, list[str]]":
    """Take --profile out of a command line.

    Returns:
        The profile, or None; and what is left.

    Raises:
        InputError: there is no such profile, or more was asked for than one.
    """
    parser = own_parser()
    parser.add_argument("--profile", action="append")
    try:
        ours, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError("--profile", "a name, or a file", error) from None
    if ours.profile is None:
        return None, rest
    if len(ours.profile) > 1:
        raise InputError("--profile", "one", ", ".join(ours.profile))
    if any(argument.split("=")[0] == "--config" for argument in rest):
        raise InputError("--config", "no --profile beside it, which may be a file too", "both")
    from spin_server.profiles.profile import read_profile

    return read_profile(ours.profile[0]), rest


def _for_vllm(profile: "Profile") -> "Profile":
    """Leave of a profile what is vLLM's.

    Raises:
        InputError: an argument of ours that does not exist, or a value of another type.
    """
    from spin_server.cli.admin_arguments import take_admin_arguments
    from spin_server.cli.spin_arguments import take_spin_arguments

    try:
        _, rest = take_spin_arguments(profile.arguments)
        _, rest = take_admin_arguments(rest)
    except InputError as error:
        raise InputError(f"profile {profile.name}", error.expected, error.got) from None
    return replace(profile, arguments=tuple(rest))


def _refuse_early(model: str, rest: Sequence[str], admin_port: int | None) -> None:
    """Say in a second what vLLM, once imported, would let us say in ten.

    The server checks all of this again with every argument parsed; here, arguments that may
    change the answer merely put it off.
    """
    from spin_server.engine import preflight
    from spin_server.engine.model_support import indexer_geometry, read_local_config

    names = {argument.split("=")[0].split(".")[0].replace("_", "-") for argument in rest}
    config = read_local_config(model)
    if config is not None and not names & {"--config", "--hf-overrides", "--hf-config-path"}:
        indexer_geometry(config)
    if names & {"--config", "--uds"}:
        return
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--host", default="127.0.0.1")
    early.add_argument("--port", type=int, default=8000)
    try:
        address, _ = early.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise InputError("serve", "vLLM's own arguments", error) from None
    if admin_port == address.port:
        raise InputError("--admin-port", "another port than the server's --port", admin_port)
    preflight.check_port(address.host, address.port)


def _vllm_help(flag: str) -> int:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser(prog="spin-server serve MODEL")).parse_args([flag])
    return OK
