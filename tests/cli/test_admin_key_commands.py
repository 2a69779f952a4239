"""The commands for keys, against the real application."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from admin_commands import Api, lines

from spin_server.admin.server import check_admin
from spin_server.admin.store.interface import StoreError
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.cli.main import main

pytestmark = pytest.mark.usefixtures("nothing_set")


def test_new_key_alone_goes_to_standard_output(used: Api, tmp_path: Path) -> None:
    used.run("tenant", "create", "acme")
    options = ("--scope", "read", "write", "--scope", "keys", "--description", "a pipeline's")
    status, out, err = used.call("key", "create", "--tenant", "acme", "--expires", "30d", *options)
    assert (status, out.startswith("spin_"), out.count("\n")) == (0, True, 1)
    assert out.strip() not in err
    assert "tenant acme, scopes keys,read,write, ends 20" in err
    mine = tmp_path / "mine"
    mine.write_text(out)
    used.secrets.append(out.strip())
    assert "target_sparsity" in used.run("policy", "get", "acme", key_file=mine)
    assert "this key is bound to the tenant 'acme'" in used.refused(
        "policy", "get", "default", key_file=mine
    )
    (listed,) = used.json("key", "list", key_file=mine)["items"]
    assert (listed["tenant"], listed["description"]) == ("acme", "a pipeline's")
    (header,) = lines("ID PREFIX TENANT SCOPES EXPIRES_AT DESCRIPTION")
    assert lines(used.run("key", "list"))[0] == header


def test_new_key_is_in_the_answer_with_json(used: Api) -> None:
    made = used.json("key", "create", "--expires", "2031-01-01T01:00:00+01:00")
    assert made["key"].startswith("spin_")
    assert (made["scopes"], made["expires_at"]) == ([], "2031-01-01T00:00:00Z")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_new_key_that_cannot_be_written_is_told(used: Api, more: list[str]) -> None:
    command = ["key", "create", "--url", used.url, "--key-file", str(used.key_file), *more]
    code = "import sys; from spin_server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code, *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    last = run.stderr.splitlines()[-1]
    assert (run.returncode, "the key is lost, so revoke key-" in last) == (2, True), run.stderr


def test_key_is_rotated_and_revoked(used: Api, tmp_path: Path) -> None:
    old_file = used.make_key(tmp_path, "--scope", "read")
    old = next(k["id"] for k in used.json("key", "list")["items"] if k["scopes"] == ["read"])
    status, out, err = used.call("key", "rotate", old, "--overlap", "0")
    assert (status, out.startswith("spin_")) == (0, True)
    assert f"it replaces {old}, which ends 20" in err
    assert (
        "401: expected a key that is valid, got one that is unknown, revoked or expired"
        in used.refused("status", key_file=old_file)
    )
    new = err.split()[0]
    assert used.run("key", "revoke", new, "--yes") == f"{new} is revoked\n"
    assert f"404: no key '{new}'" in used.refused("key", "revoke", new, "--yes")
    made = used.json("key", "create")
    assert used.json("key", "rotate", made["id"])["replaces"]["id"] == made["id"]
    assert used.json("key", "revoke", made["id"], "--yes") == {"revoked": made["id"]}


def test_key_is_shown_without_the_key(used: Api) -> None:
    made = used.json("key", "create", "--description", "a pipeline's")
    used.secrets.append(made["key"])
    found = used.json("key", "get", made["id"])
    assert found == {name: value for name, value in made.items() if name != "key"}
    assert "description  a pipeline's" in used.run("key", "get", made["id"])


def test_lost_key_is_recovered_where_the_store_can_be_written(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = api.json("key", "list")["items"][0]["id"]
    api.run("key", "revoke", first, "--yes")
    assert "401" in api.refused("status")
    assert main(["key", "recover", "--admin-store", str(tmp_path / "store.db")]) == 0
    out, err = capsys.readouterr()
    assert (out.startswith("spin_"), out.count("\n")) == (True, 1)
    assert "is made: all tenants, all scopes, ends never; it is shown this once" in err
    assert out.strip() not in err
    new = tmp_path / "new.key"
    new.write_text(out)
    deadline = time.monotonic() + 10
    while api.call("status", key_file=new)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    newest = api.json("audit", "--limit", "1", key_file=new)["items"][0]
    assert (newest["actor"], newest["action"]) == ("[store]", "key recover")


def test_nothing_is_recovered_where_no_server_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, other = tmp_path / "empty.db", tmp_path / "other.db"
    SqliteStore(empty).close()
    other.write_text("no database")
    for store, status, expected in (
        (tmp_path / "none.db", 2, "expected a store that a server has made, got no file"),
        (empty, 2, "expected a store that a server has made, got an empty one"),
        (other, 3, "other.db"),
        ("kubernetes://one", 2, "expected FILE or kubernetes://NAMESPACE/NAME"),
    ):
        assert main(["key", "recover", "--admin-store", str(store)]) == status
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), expected in err) == ("", 1, True), err
    assert not (tmp_path / "none.db").exists()


def test_recovered_key_is_in_the_answer_with_json(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "recover", "--json", "--admin-store", str(tmp_path / "store.db")]) == 0
    out, err = capsys.readouterr()
    made = json.loads(out)
    assert (made["id"][:4], made["key"][:5], err) == ("key-", "spin_", "")


def test_key_in_use_is_revoked_with_yes_only(used: Api, tmp_path: Path) -> None:
    mine = used.make_key(tmp_path, "--scope", "keys")
    key = next(k["id"] for k in used.json("key", "list")["items"] if k["scopes"] == ["keys"])
    assert "in use" not in used.run("key", "revoke", key, "--dry-run")
    refusal = used.refused("key", "revoke", key, key_file=mine)
    assert "expected --yes, for it is the key that this command uses, got none" in refusal
    assert used.run("key", "revoke", key, "--dry-run", key_file=mine)
    out = used.run("key", "revoke", key, "--yes", key_file=mine)
    assert out == f"{key} is revoked, the key that this command used\n"
    assert "401" in used.refused("key", "list", key_file=mine)


def test_key_that_has_ended_is_marked(used: Api, tmp_path: Path) -> None:
    used.make_key(tmp_path, "--expires", "1", "--description", "short-lived")
    deadline = time.monotonic() + 10
    while True:
        out = used.run("key", "list")
        (line,) = [line for line in out.splitlines() if "short-lived" in line]
        if "(ended)" in line:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100_000])
def test_store_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO commits VALUES (1, '', '', '', '', '')")
        db.execute("INSERT INTO documents VALUES ('tenant', 'acme', 1, ?)", (body,))
    assert main(["key", "recover", "--admin-store", str(path)]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "tenant acme: expected JSON" in err) == ("", 1, True), err
    with pytest.raises(StoreError, match="tenant acme: expected JSON"):  # as serve does
        check_admin(str(path), "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("create --scope everything", "422: scopes/0: expected 'read', "),
        ("create --tenant nobody", "404: no tenant 'nobody'"),
        ("create --expires 2031-01-01", "--expires: expected a span such as 30d, or a time with"),
        ("create --expires 2001-01-01T00:00:00Z", "422: expires_at: expected a time to come"),
        (
            "create --expires 999999999d",
            "--expires: expected a time before the year 9999, got '999999999d'",
        ),
        (
            "rotate key-1",
            "422: key_id: expected a key's id, such as key-0123456789abcdef, got 'key-1'",
        ),
        ("rotate key-0123456789abcdef --overlap long", "--overlap: expected seconds"),
    ],
)
def test_bad_key_is_one_line(used: Api, words: str, expected: str) -> None:
    assert expected in used.refused("key", *words.split())
