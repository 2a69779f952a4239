"""`spin-server policy`: read and change policies while the server runs."""

import argparse

from spin_server.admin.warnings import NO_TENANT_LEFT
from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import (
    Subparsers,
    add_command,
    add_dry_run,
    add_group,
    add_reason,
    add_yes,
    confirm,
    read_fields,
    read_first,
    read_if_match,
    read_seconds,
    read_whole_number,
)
from spin_server.cli.admin_output import (
    Object,
    applied_to,
    print_changes,
    print_json,
    print_policy,
    print_policy_change,
    print_prefix_cache,
    print_warnings,
    require_applied,
    text,
)
from spin_server.cli.exit_codes import OK
from spin_server.errors import InputError


def add_parser(commands: Subparsers) -> None:
    """Add the `policy` subcommands."""
    ours = add_group(commands, "policy", "read and change policies while the server runs")
    get = add_command(ours, "get", _get, "show a policy, and where each value comes from")
    get.add_argument("name", metavar="NAME", help="default, or a tenant's name")

    change = add_command(ours, "set", _set, "change fields of a policy")
    change.add_argument("name", metavar="NAME", help="default, or a tenant's name")
    change.add_argument(
        "fields",
        nargs="*",
        metavar="FIELD=VALUE",
        help="such as target_sparsity=0.5; FIELD= takes a field back",
    )
    change.add_argument("--ttl", metavar="TIME", help="go back after 90 (seconds), 30m, 1h or 2d")
    change.add_argument(
        "--canary",
        metavar="PERCENT",
        help="let that many of a hundred requests try it; 100: all from now on; 0: nobody any more",
    )
    change.add_argument(
        "--if-match",
        metavar="REV",
        help="only if the policy is at this revision (the one that is read first; *: at any)",
    )
    add_dry_run(change)
    add_reason(change)

    diff = add_command(ours, "diff", _diff, "compare two revisions of policies and tenants")
    diff.add_argument("revision", metavar="REV")
    diff.add_argument("against", nargs="?", metavar="REV2", help="the newest unless given")

    revert = add_command(ours, "revert", _revert, "bring policies and tenants back to a revision")
    revert.add_argument("revision", metavar="REV")
    add_yes(revert)
    add_dry_run(revert)
    add_reason(revert)


def _get(args: argparse.Namespace) -> int:
    with connect(args) as client:
        policy = client.get("policies", args.name).body
    if args.json:
        print_json(policy)
    else:
        print_policy(policy)
    return OK


def _set(args: argparse.Namespace) -> int:
    fields = read_fields(args.fields)
    ttl = None if args.ttl is None else read_seconds("--ttl", args.ttl)
    percent = None if args.canary is None else read_whole_number("--canary", args.canary)
    if not fields and percent is None:
        raise InputError("policy set", "FIELD=VALUE, or --canary", "neither")
    if_match = None if args.if_match is None else read_if_match(args.if_match)
    before = None
    with connect(args) as client:
        if if_match is None:
            instead = " (one that may only write does with --if-match REV or '*')"
            read = read_first(client, "policies", args.name, instead=instead)
            before, if_match = read.body, read.etag
        answer = client.send(
            "PATCH",
            "policies",
            args.name,
            body=fields,
            if_match=if_match,
            query={
                "ttl_seconds": ttl,
                "canary_percent": percent,
                "dryRun": args.dry_run,
                "reason": args.reason,
            },
        ).body
    if args.json:
        print_json(answer)
    else:
        after = answer["policy"] if args.dry_run else answer
        if before is None:  # with --if-match, a key that may not read will do
            print_policy(after)
        else:
            print(f"policy {text(args.name)}, revision {before['revision']} -> {after['revision']}")
            print_policy_change(before, after)
        print_prefix_cache(answer)
        print("dry run: nothing was changed" if args.dry_run else applied_to(answer["applied"]))
    require_applied(answer)
    return OK


def _diff(args: argparse.Namespace) -> int:
    revision = read_whole_number("REV", args.revision)
    against = None if args.against is None else read_whole_number("REV2", args.against)
    with connect(args) as client:
        found = client.get("revisions", str(revision), "diff", against=against).body
    if args.json:
        print_json(found)
    else:
        print(f"revision {found['from']} -> {found['to']}")
        print_changes(found["changes"])
        if not found["changes"]:
            print("no difference")
    return OK


def _revert(args: argparse.Namespace) -> int:
    revision = str(read_whole_number("REV", args.revision))
    with connect(args) as client:
        newest = read_first(client, "revisions", revision, "diff").body["to"]

        def revert(dry_run: str | None) -> Object:
            query = {"dryRun": dry_run, "reason": args.reason}
            path = ("revisions", revision, "revert")
            return client.send("POST", *path, if_match=f'"{newest}"', query=query).body

        if not args.dry_run and not args.yes and NO_TENANT_LEFT in revert("All")["warnings"]:
            question = f"{NO_TENANT_LEFT}\nGo back to revision {revision}?"
            confirm("policy revert", question, yes=False)
        answer = revert(args.dry_run)
    if args.json:
        print_json(answer)
    else:
        print_changes(answer["changes"])
        print_prefix_cache(answer)
        print_warnings(answer)
        if not answer["changes"]:
            same = f": policies and tenants are as they were at revision {revision}"
            print("nothing changes" + ("" if answer["warnings"] else same))
        elif args.dry_run:
            print("dry run: nothing was changed")
        else:
            print(f"revision {answer['revision']}, {applied_to(answer['applied'])}")
    require_applied(answer)
    return OK
