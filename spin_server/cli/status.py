"""`spin-server status`: what the admin API wants of the engine, and what the engine does."""

import argparse
from typing import Any

from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import Subparsers, add_command
from spin_server.cli.admin_output import Object, percent, print_json, print_table, sourced, text
from spin_server.cli.exit_codes import OK

_MOST_TENANTS = 20  # shown


def add_parser(commands: Subparsers) -> None:
    """Add the `status` subcommand."""
    add_command(commands, "status", _run, "show what is wanted of the engine, and what it does")


def _run(args: argparse.Namespace) -> int:
    with connect(args) as client:
        status = client.get("status").body
    if args.json:
        print_json(status)
    else:
        print_table([("server", client.url), *_rows(status)])
    return OK


def _rows(status: Object) -> list[tuple[str, Any]]:
    trouble = status["trouble"]
    # Whose key is bound to a tenant sees that tenant's policy, and nobody else's.
    policy = status["default_policy"] or status["tenant_policy"]
    shown = ("target_sparsity", "exploration_share")
    counts = [(name, status[name]) for name in ("tenants", "keys") if status[name] is not None]
    return [
        ("wanted", f"revision {status['desired_revision']}"),
        ("applied", _applied(status)),
        ("workers", _workers(status["ranks"])),
        (policy["name"], ", ".join(f"{n} {sourced(policy['fields'][n])}" for n in shown)),
        ("realized", _realized(status["realized"])),
        *_by_tenant(status["realized"]),
        *_pending(status),
        *counts,
        ("serving", "needs a key" if status["serving_needs_key"] else "needs no key: no tenants"),
        ("trouble", "; ".join(f"{n}: {text(v)}" for n, v in trouble.items() if v) or "none"),
    ]


def _pending(status: Object) -> list[tuple[str, str]]:
    """What is not to last, or not everybody's yet."""
    limits = [f"{text(t['name'])} at {text(t['ends_at'])}" for t in status["time_limits"]]
    canaries = [f"{text(c['name'])} {percent(c)}" for c in status["canaries"]]
    found = [("goes back", ", ".join(limits)), ("canaries", ", ".join(canaries))]
    return [row for row in found if row[1]]


def _applied(status: Object) -> str:
    if status["applied_revision"] is None:
        return "nothing yet"
    behind = status["behind_seconds"]
    late = f", for {behind:.1f} s behind" if behind else ""
    return f"revision {status['applied_revision']}{late}"


def _workers(ranks: list[Object]) -> str:
    revisions = {rank["revision"] for rank in ranks}
    if len(revisions) == 1:
        return f"{len(ranks)} at revision {revisions.pop()}"
    each = [f"engine {r['engine']} rank {r['rank']} at revision {r['revision']}" for r in ranks]
    return ", ".join(each) or "no answer"


def _by_tenant(realized: Object | None) -> list[tuple[str, str]]:
    """What each did, if there are several, most blocks first."""
    if realized is None or len(realized["by_tenant"]) < 2:
        return []
    parts = sorted(realized["by_tenant"].items(), key=lambda part: -part[1]["sparse_step_blocks"])
    more = [("", f"and {len(parts) - _MOST_TENANTS:,} more")] if len(parts) > _MOST_TENANTS else []
    return [("  " + text(name), _realized(part)) for name, part in parts[:_MOST_TENANTS]] + more


def _realized(realized: Object | None) -> str:
    if realized is None:
        return "no answer"
    if realized["realized_sparsity"] is None:
        return f"nothing sparse yet; {realized['dense_step_blocks']:,} blocks in dense steps"
    explored = realized["realized_exploration"]
    exploration = "-" if explored is None else f"{explored:.4f}"
    return (
        f"sparsity {realized['realized_sparsity']:.4f}, exploration {exploration}, of "
        f"{realized['sparse_step_blocks']:,} blocks; {realized['dense_step_blocks']:,} more in "
        "dense steps"
    )
