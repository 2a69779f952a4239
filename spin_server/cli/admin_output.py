"""What the admin API answers, as plain text for people."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spin_server.cli.admin_client import NoAnswerError, printable

Object = Mapping[str, Any]  # a JSON object


def print_json(answer: Object) -> None:
    """Print an answer as it came, on one line."""
    print(json.dumps(answer))


def text(value: Any) -> str:
    """Write a value: nothing as a hyphen, a list with commas."""
    if isinstance(value, list):
        return ",".join(map(text, value)) or "-"
    return "-" if value is None or value == "" else printable(value)


def print_table(rows: Iterable[Sequence[Any]], indent: str = "") -> None:
    """Print rows in columns."""
    shown = [[text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        line = "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True))
        print(f"{indent}{line}".rstrip())


def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sourced(field: Object) -> str:
    """Write a policy's field: its value, and where that comes from."""
    return f"{text(field['value'])} ({text(field['source'])})"


def print_policy(policy: Object, indent: str = "") -> None:
    """Print a policy."""
    print(f"{indent}policy {text(policy['name'])}, revision {policy['revision']}")
    rows = [(name, f["value"], f["source"]) for name, f in policy["fields"].items()]
    print_table(rows, indent + "  ")
    if policy["expires_at"] is not None:
        print(f"{indent}  goes back by itself at {text(policy['expires_at'])}")
    if policy["canary"] is not None:
        print(f"{indent}  tried by {canary(policy)}")


def canary(policy: Object) -> str:
    """Say what some of a policy's requests try."""
    if (found := policy["canary"]) is None:
        return "nobody"
    fields = ", ".join(f"{text(name)}={text(value)}" for name, value in found["fields"].items())
    return f"{found['percent']}% of the requests: {fields}"


def percent(canary: Object | None) -> str | None:
    """Write how many of a policy's requests try a change."""
    return None if canary is None else f"{canary['percent']}%"


def print_policy_change(before: Object, after: Object) -> None:
    """Print what became of a policy: every field whose value, or whose source, is another."""
    rows = [
        (name, sourced(was), "->", sourced(now))
        for name, now in after["fields"].items()
        if (was := before["fields"].get(name, {"value": None, "source": None})) != now
    ]
    ends = [text(policy["expires_at"] or "never") for policy in (before, after)]
    if ends[0] != ends[1]:
        rows.append(("goes back by itself", ends[0], "->", ends[1]))
    tried = [canary(policy) for policy in (before, after)]
    if tried[0] != tried[1]:
        rows.append(("tried by", tried[0], "->", tried[1]))
    print_table(rows, "  ")
    if not rows:
        print("  nothing changes")


def _flat(body: Object | None) -> dict[str, Any]:
    """Lay a document out, a policy's fields beside its end."""
    found = dict(body or {})
    expires, tried = found.pop("expires", None), found.pop("canary", None)
    found.update(found.pop("fields", {}))
    if tried is not None:
        found["canary_percent"] = tried["percent"]
        found.update({f"canary {name}": value for name, value in tried["fields"].items()})
    return found if expires is None else {**found, "expires_at": expires["at"]}


def print_changes(changes: Iterable[Object]) -> None:
    """Print what became of documents; a hyphen stands for what is not set."""
    changes = list(changes)
    gone = {c["name"] for c in changes if c["kind"] == "tenant" and c["after"] is None}
    for change in changes:
        before, after = _flat(change["before"]), _flat(change["after"])
        print(f"{text(change['kind'])} {text(change['name'])}{_fate(change, gone)}")
        print_table(
            [
                (name, before.get(name), "->", after.get(name))
                for name in dict.fromkeys([*before, *after])
                if text(before.get(name)) != text(after.get(name))
            ],
            "  ",
        )


def _fate(change: Object, gone: set[str]) -> str:
    """Say whether a document is new or gone; a policy whose tenant stays goes on without one."""
    if change["before"] is None:
        return " is new"
    if change["after"] is not None:
        return ""
    if change["kind"] != "policy" or change["name"] in gone:
        return " is gone"
    return " is as launched again" if change["name"] == "default" else " inherits all again"


def print_plainly(args: argparse.Namespace, answer: Object) -> bool:
    """Print an answer as JSON, or what a dry run would change, if either is asked for.

    Returns:
        Whether it was.
    """
    if args.json:
        print_json(answer)
    elif args.dry_run:
        print_changes(answer["changes"])
        print_prefix_cache(answer)
        print_warnings(answer)
        print("dry run: nothing was changed")
    return bool(args.json or args.dry_run)


def print_prefix_cache(answer: Object) -> None:
    """Say whose cached prefixes are found no more, if anybody's are."""
    found = answer["prefix_cache"]
    if found["count"]:
        more = found["count"] - len(found["begin_anew"])
        names = ", ".join(map(text, found["begin_anew"])) + (f" and {more:,} more" if more else "")
        print(f"cached prefixes begin anew: {names}")


def print_warnings(answer: Object) -> None:
    """Print what may not have been meant."""
    for warning in answer["warnings"]:
        print(text(warning))


def applied_to(applied: Object) -> str:
    """Say whether a change is in force, and where."""
    workers = count(len(applied["ranks"]), "worker")
    return f"in force in {workers}" if applied["complete"] else "stored, not in force yet"


def require_applied(answer: Object) -> None:
    """Say so if a change is stored, but not yet in force.

    Raises:
        NoAnswerError: the engine did not take it in time.
    """
    applied = answer.get("applied")
    if applied is not None and not applied["complete"]:
        raise NoAnswerError(
            f"revision {applied['desired_revision']} is stored: expected the engine to take it, "
            f"got {printable(applied['trouble'] or 'no answer yet')}; the server goes on trying: "
            "see `spin-server status`"
        )
