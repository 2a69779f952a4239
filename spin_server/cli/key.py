"""`spin-server key`: list, show, make, replace, revoke and recover keys.

A new key is the only thing that goes to standard output, so that it can be piped to where it is
kept; with --json it is part of the answer.
"""

import argparse
import sys
from pathlib import Path

from spin_server.admin.errors import RefusedError
from spin_server.admin.store.interface import StoreError
from spin_server.cli.admin_client import connect
from spin_server.cli.admin_command import (
    Subparsers,
    add_command,
    add_dry_run,
    add_group,
    add_json,
    add_reason,
    add_yes,
    confirm,
    read_moment,
    read_seconds,
)
from spin_server.cli.admin_output import Object, print_json, print_plainly, print_table, text
from spin_server.cli.exit_codes import OK
from spin_server.cli.standard_output import OutputError
from spin_server.errors import InputError


def add_parser(commands: Subparsers) -> None:
    """Add the `key` subcommands."""
    ours = add_group(commands, "key", "list, show, make, replace, revoke and recover keys")
    add_command(ours, "list", _list, "list the keys; none is shown itself")

    get = add_command(ours, "get", _get, "show everything of a key but the key")
    get.add_argument("id", metavar="ID", help="such as key-0123456789abcdef")

    create = add_command(ours, "create", _create, "make a key, and print it once")
    create.add_argument("--tenant", metavar="NAME", help="the only one that it is good for")
    create.add_argument(
        "--scope",
        action="extend",
        nargs="+",
        default=[],
        metavar="SCOPE",
        help="read, write, keys or audit; without, the key is for the serving API only",
    )
    create.add_argument(
        "--expires", metavar="TIME", help="in 90 (seconds), 30m, 1h or 30d, or 2030-12-31T23:59:59Z"
    )
    create.add_argument("--description", metavar="TEXT", default="", help="for people")
    add_dry_run(create)
    add_reason(create)

    rotate = add_command(ours, "rotate", _rotate, "replace a key, and print the new one once")
    rotate.add_argument("id", metavar="ID", help="such as key-0123456789abcdef")
    rotate.add_argument(
        "--overlap", metavar="TIME", default="1h", help="for how long the old key goes on (1h)"
    )
    add_dry_run(rotate)
    add_reason(rotate)

    revoke = add_command(ours, "revoke", _revoke, "refuse a key from now on")
    revoke.add_argument("id", metavar="ID")
    add_yes(revoke)
    add_dry_run(revoke)
    add_reason(revoke)

    recover = ours.add_parser(
        "recover",
        help="make a key in the store itself, where every other is lost",
        description="Make a key that may do everything in the store itself, and print it once: "
        "for whoever may write the store, and has no key left. Running servers take it up. "
        "Exit status: 0; 2 for bad input; 3 if the store cannot be written.",
        allow_abbrev=False,
    )
    recover.add_argument(
        "--admin-store",
        metavar="STORE",
        required=True,
        help="as given to `spin-server serve`: FILE or kubernetes://NAMESPACE/NAME",
    )
    add_json(recover)
    recover.set_defaults(run=_recover)


def _whose(key: Object) -> str:
    tenant = "all tenants" if key["tenant"] is None else f"tenant {text(key['tenant'])}"
    return f"{tenant}, scopes {text(key['scopes'])}, ends {text(key['expires_at'] or 'never')}"


def _list(args: argparse.Namespace) -> int:
    with connect(args) as client:
        keys = client.items("keys")
    if args.json:
        print_json(keys)
        return OK
    columns = ("id", "prefix", "tenant", "scopes", "expires_at", "description")
    rows = [
        [f"{key[c]} (ended)" if c == "expires_at" and key["ended"] else key[c] for c in columns]
        for key in keys["items"]
    ]
    print_table([[column.upper() for column in columns], *rows])
    return OK


def _get(args: argparse.Namespace) -> int:
    with connect(args) as client:
        key = client.get("keys", args.id).body
    if args.json:
        print_json(key)
    else:
        print_table([(name, key[name]) for name in key])
    return OK


def _print_new(args: argparse.Namespace, answer: Object, said: str) -> None:
    if not args.json:
        print(f"{said}; it is shown this once, on standard output", file=sys.stderr, flush=True)
    try:
        if args.json:
            print_json(answer)
        else:
            print(answer["key"])
        sys.stdout.flush()
    except OutputError as error:
        got = f"{error.reason}: the key is lost, so revoke {text(answer['id'])}"
        raise InputError("standard output", "room for the new key", got) from None


def _create(args: argparse.Namespace) -> int:
    wanted = {
        "tenant": args.tenant,
        "scopes": args.scope,
        "description": args.description,
        "expires_at": None if args.expires is None else read_moment("--expires", args.expires),
    }
    with connect(args) as client:
        query = {"dryRun": args.dry_run, "reason": args.reason}
        answer = client.send("POST", "keys", body=wanted, query=query).body
    if args.dry_run:
        print_plainly(args, answer)
        return OK
    _print_new(args, answer, f"{text(answer['id'])} is made: {_whose(answer)}")
    return OK


def _rotate(args: argparse.Namespace) -> int:
    overlap = read_seconds("--overlap", args.overlap)
    with connect(args) as client:
        key = client.get("keys", args.id)
        answer = client.send(
            "POST",
            "keys",
            args.id,
            "rotate",
            body={"overlap_seconds": overlap},
            if_match=key.etag,
            query={"dryRun": args.dry_run, "reason": args.reason},
        ).body
    if args.dry_run:
        print_plainly(args, answer)
        return OK
    old = answer["replaces"]
    said = f"{text(answer['id'])} is made: {_whose(answer)}"
    said += f"; it replaces {text(old['id'])}, which ends {text(old['expires_at'])}"
    _print_new(args, answer, said)
    return OK


def _revoke(args: argparse.Namespace) -> int:
    with connect(args) as client:
        key = client.get("keys", args.id)
        in_use = client.uses(key.body["prefix"])
        if in_use and not args.dry_run and not args.yes:
            got = "none; nothing was done"
            raise InputError("key revoke", "--yes, for it is the key that this command uses", got)
        question = f"Revoke {text(args.id)} ({_whose(key.body)})?"
        if not args.dry_run:
            confirm("key revoke", question, yes=args.yes)
        query = {"dryRun": args.dry_run, "reason": args.reason}
        answer = client.send("DELETE", "keys", args.id, if_match=key.etag, query=query).body
    if not print_plainly(args, answer):
        used = ", the key that this command used" if in_use else ""
        print(f"{text(answer['revoked'])} is revoked{used}")
    return OK


def _recover(args: argparse.Namespace) -> int:
    # Imported here: no other command opens a store.
    from spin_server.admin.administration import Administration
    from spin_server.admin.location import is_file
    from spin_server.admin.opening import open_store
    from spin_server.policy.policy import Policy

    location: str = args.admin_store
    if is_file(location) and not Path(location).is_file():
        raise InputError("--admin-store", "a store that a server has made", f"no file {location!r}")
    store, _ = open_store(location)
    try:
        administration = Administration(store, Policy())
        if administration.state.revision == 0:
            raise InputError("--admin-store", "a store that a server has made", "an empty one")
        key = administration.recover_key()
    except RefusedError as error:
        raise StoreError(str(error)) from error
    finally:
        store.close()
    made = {"id": key.key_id, "key": key.secret}
    _print_new(args, made, f"{key.key_id} is made: all tenants, all scopes, ends never")
    return OK
