"""`spin-server tenant`: list, make, describe, limit and delete tenants."""

import argparse

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
)
from spin_server.cli.admin_output import (
    Object,
    applied_to,
    percent,
    print_json,
    print_plainly,
    print_policy,
    print_table,
    print_warnings,
    require_applied,
    sourced,
    text,
)
from spin_server.cli.exit_codes import OK

_SHOWN = ("target_sparsity", "exploration_share")


def add_parser(commands: Subparsers) -> None:
    """Add the `tenant` subcommands."""
    ours = add_group(commands, "tenant", "list, make, describe, limit and delete tenants")
    add_command(ours, "list", _list, "list the tenants")

    get = add_command(ours, "get", _get, "show a tenant and its policy")
    get.add_argument("name", metavar="NAME")

    create = add_command(ours, "create", _create, "make a tenant")
    create.add_argument("name", metavar="NAME", help="a DNS label, such as search-team")
    create.add_argument("--description", metavar="TEXT", default="", help="for people")
    create.add_argument(
        "fields", nargs="*", metavar="FIELD=VALUE", help="of its policy, where it is to differ"
    )
    add_dry_run(create)
    add_reason(create)

    describe = add_command(ours, "describe", _describe, "change a tenant's description")
    describe.add_argument("name", metavar="NAME")
    describe.add_argument("description", metavar="TEXT", help="for people")
    add_dry_run(describe)
    add_reason(describe)

    limit = add_command(ours, "limit", _limit, "say what a tenant may have at once")
    limit.add_argument("name", metavar="NAME")
    limit.add_argument(
        "limits",
        nargs="+",
        metavar="LIMIT=NUMBER",
        help="concurrent_requests, queued_tokens or context_tokens; LIMIT= lifts one",
    )
    add_dry_run(limit)
    add_reason(limit)

    delete = add_command(ours, "delete", _delete, "delete a tenant, its policy and its keys")
    delete.add_argument("name", metavar="NAME")
    add_yes(delete)
    add_dry_run(delete)
    add_reason(delete)


def _list(args: argparse.Namespace) -> int:
    with connect(args) as client:
        tenants = client.items("tenants")
    if args.json:
        print_json(tenants)
    elif not tenants["items"]:
        print("no tenants")
    else:
        rows = [
            (
                t["name"],
                *(sourced(t["policy"]["fields"][f]) for f in _SHOWN),
                t["policy"]["expires_at"],
                percent(t["policy"]["canary"]),
                t["description"],
            )
            for t in tenants["items"]
        ]
        titles = ("TENANT", *map(str.upper, _SHOWN), "GOES_BACK", "CANARY", "DESCRIPTION")
        print_table([titles, *rows])
    return OK


def _print_tenant(tenant: Object) -> None:
    print(f"tenant {text(tenant['name'])}, revision {tenant['revision']}")
    rows = [(n, tenant[n]) for n in ("description", "created_at")]
    rows += [(n, limit) for n, limit in tenant["limits"].items() if limit is not None]
    print_table(rows, "  ")
    print_policy(tenant["policy"], "  ")


def _get(args: argparse.Namespace) -> int:
    with connect(args) as client:
        tenant = client.get("tenants", args.name).body
    if args.json:
        print_json(tenant)
    else:
        _print_tenant(tenant)
    return OK


def _create(args: argparse.Namespace) -> int:
    wanted = {
        "name": args.name,
        "description": args.description,
        "policy": read_fields(args.fields),
    }
    with connect(args) as client:
        query = {"dryRun": args.dry_run, "reason": args.reason}
        answer = client.send("POST", "tenants", body=wanted, query=query).body
    if not print_plainly(args, answer):
        _print_tenant(answer)
        print(applied_to(answer["applied"]))
    require_applied(answer)
    return OK


def _describe(args: argparse.Namespace) -> int:
    return _patch(args, {"description": args.description})


def _limit(args: argparse.Namespace) -> int:
    return _patch(args, {"limits": read_fields(args.limits)})


def _patch(args: argparse.Namespace, changes: Object) -> int:
    with connect(args) as client:
        before = read_first(client, "tenants", args.name)
        answer = client.send(
            "PATCH",
            "tenants",
            args.name,
            body=dict(changes),
            if_match=before.etag,
            query={"dryRun": args.dry_run, "reason": args.reason},
        ).body
    if not print_plainly(args, answer):
        _print_tenant(answer)
    return OK


def _delete(args: argparse.Namespace) -> int:
    with connect(args) as client:
        tenant = read_first(client, "tenants", args.name)

        def delete(dry_run: str | None) -> Object:
            query = {"dryRun": dry_run, "reason": args.reason}
            path = ("tenants", args.name)
            return client.send("DELETE", *path, if_match=tenant.etag, query=query).body

        if not args.dry_run and not args.yes:
            warned = "".join(f"{text(warning)}\n" for warning in delete("All")["warnings"])
            question = f"{warned}Delete the tenant {text(args.name)}, its policy and its keys?"
            confirm("tenant delete", question, yes=False)
        answer = delete(args.dry_run)
    if not print_plainly(args, answer):
        print_warnings(answer)
        print(f"tenant {text(answer['deleted'])} is gone, {applied_to(answer['applied'])}")
    require_applied(answer)
    return OK
