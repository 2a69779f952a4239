"""`spin-server doctor`: say what would stand in the way of serving, and how to mend it."""

import argparse
from typing import Any

from spin_server.cli.exit_codes import OK, START_FAILED
from spin_server.errors import InputError

Subparsers = Any  # argparse names the type privately


def add_parser(commands: Subparsers) -> None:
    """Add the `doctor` subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="examine this machine, a model and a running server",
        description="Examine this machine, a model and a running server; each problem with its "
        "fix. Exit status: 0 if nothing stands in the way, 3 otherwise.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of the longest context (the model's)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests at once (vLLM's default)"
    )
    parser.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="run MODEL (on a CPU without one, a tiny model) with tensor parallelism N, 2 or more, "
        "and compare what the ranks choose and remember after every step",
    )
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="of the engine, with --ranks (1000)"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for name, least in (("max_model_len", 1), ("max_num_seqs", 1), ("ranks", 2), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')}", f"at least {least}", value)
    from spin_server.engine.doctor import examine

    problems = 0
    for finding in examine(
        args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        url=args.url,
        ranks=args.ranks,
        steps=args.steps,
    ):
        problems += not finding.ok
        verdict = "ok     " if finding.ok else "PROBLEM"
        print(f"{verdict} {finding.name}: {finding.text}", flush=True)
    print(f"{problems} problem{'' if problems == 1 else 's'}")
    return START_FAILED if problems else OK
