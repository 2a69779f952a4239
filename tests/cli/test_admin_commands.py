"""The admin API's commands, against the real application; only the engine is not there."""

import asyncio
import http.server
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry

from spin_server.admin.engine_link import Figures, RankReport
from spin_server.admin.http import context
from spin_server.admin.server import AdminServer
from spin_server.cli import admin_client
from spin_server.cli.admin_arguments import DEFAULT_PORT
from spin_server.cli.main import main
from spin_server.policy.policy import Policy

COMMANDS = [
    "status",
    "policy get default",
    "policy set default target_sparsity=0.5",
    "policy diff 0",
    "policy revert 0",
    "tenant list",
    "tenant get acme",
    "tenant create acme",
    "tenant delete acme --yes",
    "key list",
    "key create",
    "key rotate key-0123456789abcdef",
    "key revoke key-0123456789abcdef --yes",
    "audit",
]


class Engine:
    """An engine of one worker that takes every policy, unless it is out of order."""

    first_row, capacity, reserved = 1, 64, frozenset[str]()

    def __init__(self) -> None:
        self.rows: dict[int, Policy] = {}
        self.revision = 0
        self.broken = False

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        if self.broken:
            raise RuntimeError("out of order")
        self.rows.update(rows)
        self.revision = revision
        return await self.reports()

    async def reports(self) -> list[RankReport]:
        return [RankReport(0, 0, self.revision)]

    async def figures(self) -> dict[str, Figures]:
        return {"default": Figures(kept=70, explored=7, skipped=30, dense=1234)}

    def name_rows(self, rows: Mapping[str, int]) -> None:
        pass


@dataclass
class Api:
    """A running admin API, and what a test asks of it on the command line."""

    url: str
    key: str
    key_file: Path
    engine: Engine
    capsys: pytest.CaptureFixture[str]
    secrets: list[str] = field(default_factory=list)  # keys that were printed when they were made

    def call(self, *argv: str, key_file: Path | None = None) -> tuple[int, str, str]:
        """Run a command: exit status, standard output, standard error. No key may be in either."""
        where = ["--url", self.url, "--key-file", str(key_file or self.key_file)]
        status = main([*argv, *where])
        out, err = self.capsys.readouterr()
        for secret in (self.key, *self.secrets):
            assert secret not in out + err
        if status:
            assert err.startswith("spin-server: ")
            assert err.count("\n") == 1
        return status, out, err

    def run(self, *argv: str, **more: Any) -> str:
        status, out, err = self.call(*argv, **more)
        assert (status, err) == (0, ""), (argv, err)
        return out

    def json(self, *argv: str, **more: Any) -> Any:
        out = self.run(*argv, "--json", **more)
        assert out.count("\n") == 1
        return json.loads(out)

    def refused(self, *argv: str, status: int = 2, **more: Any) -> str:
        got, out, err = self.call(*argv, **more)
        assert (got, out) == (status, ""), (argv, out, err)
        return err

    def make_key(self, folder: Path, *options: str) -> Path:
        """Make a key, and the file that holds it."""
        status, out, _ = self.call("key", "create", *options)
        assert (status, out.count("\n")) == (0, 1)
        self.secrets.append(out.strip())
        path = folder / f"{len(self.secrets)}.key"
        path.write_text(out)
        return path


@contextmanager
def running(store: Path, engine: Engine) -> Iterator[AdminServer]:
    """Run the admin API as `spin-server serve` does, in a thread's event loop."""
    ready: list[Any] = []
    done = threading.Event()

    async def serve() -> None:
        server = AdminServer(store, "127.0.0.1", 0, Policy(), engine, CollectorRegistry())
        stop = asyncio.Event()
        try:
            await server.start()
            ready.extend((server, asyncio.get_running_loop(), stop))
            done.set()
            await stop.wait()
        finally:
            done.set()
            await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert done.wait(30)
    server, loop, stop = ready
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPIN_ADMIN_URL", "SPIN_ADMIN_KEY", "SPIN_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A proxy would be asked for every host, if the commands looked for one.
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.fixture(scope="module")
def _quiet() -> Iterator[None]:
    """Without the server's log on standard error, which is another process's otherwise."""
    ours = logging.getLogger("spin_server.admin")
    ours.setLevel(logging.CRITICAL)
    yield
    ours.setLevel(logging.NOTSET)


def speak_to(server: AdminServer, engine: Engine, capsys: pytest.CaptureFixture[str]) -> Api:
    return Api(server.url, server.key_file.read_text().strip(), server.key_file, engine, capsys)


@pytest.fixture
def api(tmp_path: Path, capsys: pytest.CaptureFixture[str], _quiet: None) -> Iterator[Api]:
    """A new server: it is at revision 1, which made its first key."""
    engine = Engine()
    with running(tmp_path / "store.db", engine) as server:
        yield speak_to(server, engine, capsys)


@pytest.fixture(scope="module")
def _one_server(tmp_path_factory: pytest.TempPathFactory, _quiet: None) -> Iterator[AdminServer]:
    with running(tmp_path_factory.mktemp("admin") / "store.db", Engine()) as server:
        yield server


@pytest.fixture
def used(_one_server: AdminServer, capsys: pytest.CaptureFixture[str]) -> Api:
    """A server that other tests use too: for what changes nothing, or nothing of theirs."""
    return speak_to(_one_server, Engine(), capsys)


def lines(out: str) -> list[list[str]]:
    """The words of each line that has any: columns may be as wide as they like."""
    return [line.split() for line in out.splitlines() if line.strip()]


# status, policies, tenants


def test_status_shows_what_is_wanted_and_what_is(api: Api) -> None:
    out = api.run("status")
    assert lines(out) == lines(f"""
        server    {api.url}
        wanted    revision 1
        applied   revision 1
        workers   1 at revision 1
        default   target_sparsity 0.3 (launch), exploration_share 0.05 (launch)
        realized  sparsity 0.3000, exploration 0.1000, of 100 blocks; 1,234 more in dense steps
        tenants   0
        keys      1
        trouble   none
    """)
    assert {line.index(line.split()[1]) for line in out.splitlines()} == {10}  # aligned
    found = api.json("status")
    assert found["ranks"] == [{"engine": 0, "rank": 0, "revision": 1}]
    assert found["realized"]["realized_sparsity"] == 0.3


def test_policy_is_shown_with_the_source_of_each_value(api: Api) -> None:
    out = api.run("policy", "get", "default")
    assert lines(out) == lines("""
        policy default, revision 0
          target_sparsity     0.3      launch
          exploration_share   0.05     launch
          exploration_policy  random   launch
          budget              uniform  launch
          probe_period        0        launch
          ema_decay           0.5      launch
    """)
    found = api.json("policy", "get", "default")
    assert found["fields"]["target_sparsity"] == {"value": 0.3, "source": "launch"}


def test_policy_set_shows_old_and_new_and_reaches_the_engine(api: Api) -> None:
    fields = ("target_sparsity=0.5", "--reason", "INC-7", "probe_period=8")
    out = api.run("policy", "set", "default", *fields, "exploration_policy=staleness")
    assert lines(out) == lines("""
        policy default, revision 0 -> 2
          target_sparsity     0.3 (launch)     ->  0.5 (default)
          exploration_policy  random (launch)  ->  staleness (default)
          probe_period        0 (launch)       ->  8 (default)
        in force in 1 worker
    """)
    applied = api.engine.rows[0]
    assert (float(applied.sparsity), applied.probe_period) == (0.5, 8)
    out = api.run("policy", "set", "default", "target_sparsity=", "probe_period=8")
    assert lines(out)[1:-1] == lines("target_sparsity  0.5 (default)  ->  0.3 (launch)")
    out = api.run("policy", "set", "default", "probe_period=8")
    assert lines(out)[1:-1] == [["nothing", "changes"]]


def test_policy_set_for_a_while_says_when_it_ends(used: Api) -> None:
    out = used.run("policy", "set", "default", "target_sparsity=0.5", "--ttl", "1h")
    (end,) = [line for line in lines(out) if line[0] == "goes"]
    assert end[:6] == ["goes", "back", "by", "itself", "never", "->"]
    assert f"goes back by itself at {end[6]}" in used.run("policy", "get", "default")
    # Another change without a time limit lasts, and leaves the first one's as it is.
    out = used.run("policy", "set", "default", "exploration_share=0.1")
    assert "exploration_share" in out
    assert "goes back" not in out
    assert f"goes back by itself at {end[6]}" in used.run("policy", "get", "default")


def test_policy_dry_run_changes_nothing(used: Api) -> None:
    before = used.json("policy", "get", "default")
    out = used.run("policy", "set", "default", "target_sparsity=0.75", "--dry-run")
    assert "->  0.75 (default)" in out
    assert "dry run: nothing was changed" in out
    found = used.json("policy", "set", "default", "target_sparsity=0.75", "--dry-run")
    assert found["dry_run"] is True
    assert used.json("policy", "get", "default") == before


def test_policy_if_match_is_sent_as_given(api: Api) -> None:
    api.run("policy", "set", "default", "target_sparsity=0.5", "--if-match", "0")
    error = api.refused("policy", "set", "default", "target_sparsity=0.6", "--if-match", "0")
    assert error == (
        "spin-server: PATCH /v1/policies/default: expected success, got 412: "
        'policy default: expected If-Match "2", got "0"\n'
    )
    for tag, value in (('"2"', "0.6"), ("*", "0.7")):
        found = api.json("policy", "set", "default", f"target_sparsity={value}", "--if-match", tag)
        assert found["fields"]["target_sparsity"]["value"] == float(value)
        assert found["applied"]["complete"] is True
    assert "--if-match" in api.refused("policy", "set", "default", "budget=", "--if-match", "x")


def test_write_only_key_changes_a_policy_with_if_match(used: Api, tmp_path: Path) -> None:
    writer = used.make_key(tmp_path, "--scope", "write")
    change = ("policy", "set", "default", "target_sparsity=0.5")
    assert "this key may not read" in used.refused(*change, key_file=writer)
    out = used.run(*change, "--if-match", "*", key_file=writer)
    assert ["target_sparsity", "0.5", "default"] in lines(out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("target_sparsity=7", "422: body/target_sparsity"),
        ("target_sparsity=NaN", "422: body/target_sparsity"),
        ("probe_period=1.5", "422: body/probe_period"),
        ("nonsense=1", "422: body/nonsense: Extra inputs are not permitted"),
        ("max_miss_rate=0.5", "guard rails do not exist in this release"),
        ("target_sparsity", "field: expected FIELD=VALUE, or FIELD= to take it back"),
        ("budget= budget=uniform", "field budget: expected one value, got two"),
        ("budget= --ttl soon", "--ttl: expected seconds, or a span such as"),
        ("budget= --ttl 0", "422: query/ttl_seconds"),
    ],
)
def test_bad_policy_is_one_line(used: Api, words: str, expected: str) -> None:
    assert expected in used.refused("policy", "set", "default", *words.split())


def test_policy_diff_and_revert(api: Api) -> None:
    api.run("policy", "set", "default", "target_sparsity=0.5")  # revision 2
    api.run("tenant", "create", "acme", "target_sparsity=0.6")  # revision 3
    out = api.run("policy", "diff", "1", "2")
    assert lines(out) == lines("""
        revision 1 -> 2
        policy default is new
          target_sparsity  -  ->  0.5
    """)
    assert "tenant acme is new" in api.run("policy", "diff", "1")
    assert api.run("policy", "diff", "3") == "revision 3 -> 3\nno difference\n"
    assert api.json("policy", "diff", "2", "1")["changes"][0]["after"] is None

    out = api.run("policy", "revert", "1", "--dry-run")
    assert "tenant acme is gone" in out
    assert "dry run: nothing was changed" in out
    assert api.json("policy", "revert", "1", "--dry-run")["dry_run"] is True
    out = api.run("policy", "revert", "1", "--reason", "INC-8")
    assert "policy acme is gone" in out
    assert out.endswith("revision 4, in force in 1 worker\n")
    assert float(api.engine.rows[0].sparsity) == 0.3
    assert "as they were at revision 1" in api.run("policy", "revert", "1")
    assert api.json("policy", "revert", "2")["revision"] == 5
    assert "404: revision 99: expected 0 to 5" in api.refused("policy", "revert", "99")
    assert "404: revision 99" in api.refused("policy", "diff", "1", "99")
    assert "REV: expected a whole number" in api.refused("policy", "diff", "x")


def test_tenant_from_its_making_to_its_end(api: Api) -> None:
    assert api.run("tenant", "list") == "no tenants\n"
    words = ("--description", "Search", "target_sparsity=0.65")
    out = api.run("tenant", "create", "acme", *words)
    assert lines(out)[0] == ["tenant", "acme,", "revision", "2"]
    assert ["target_sparsity", "0.65", "tenant"] in lines(out)
    assert out.endswith("\nin force in 1 worker\n")
    out = api.run("tenant", "list")
    assert lines(out) == lines("""
        TENANT  TARGET_SPARSITY  EXPLORATION_SHARE  DESCRIPTION
        acme    0.65 (tenant)    0.05 (launch)      Search
    """)
    assert "description  Search" in api.run("tenant", "get", "acme")
    assert api.json("tenant", "get", "acme")["description"] == "Search"
    assert "409: tenant 'acme' exists" in api.refused("tenant", "create", "acme")
    out = api.run("policy", "set", "acme", "target_sparsity=")
    assert "0.65 (tenant)  ->  0.3 (launch)" in out
    out = api.run("tenant", "delete", "acme", "--yes", "--reason", "INC-9")
    assert out == "tenant acme is gone, in force in 1 worker\n"
    assert "404: tenant 'acme'" in api.refused("tenant", "get", "acme")
    assert api.json("tenant", "create", "acme")["applied"]["complete"] is True
    assert api.json("tenant", "delete", "acme", "--yes")["deleted"] == "acme"


@pytest.mark.parametrize("name", ["Not_A_Label", "default", "a/../b", "ü", "\udcff", ""])
def test_bad_tenant_name_is_one_line(used: Api, name: str) -> None:
    used.refused("tenant", "create", name)
    used.refused("tenant", "get", name)


@pytest.mark.parametrize("name", [".", "..", "../keys", "%2e%2e", "a?b#c"])
def test_name_in_a_path_stays_a_name(used: Api, name: str) -> None:
    assert "tenant" in used.refused("tenant", "delete", name, "--yes")


def test_lists_are_read_to_the_end(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "PAGE_ITEMS", 2)
    for number in range(5):
        api.run("tenant", "create", f"t{number}")
    assert [t["name"] for t in api.json("tenant", "list")["items"]] == [f"t{n}" for n in range(5)]
    assert len(lines(api.run("tenant", "list"))) == 6
    log = api.json("audit", "--limit", "3")
    assert [entry["revision"] for entry in log["items"]] == [6, 5, 4]
    assert log["next_cursor"] == "4"
    assert api.json("audit")["next_cursor"] is None


# keys


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
    assert "401: no such key, or one that has expired" in used.refused("status", key_file=old_file)
    new = err.split()[0]
    assert used.run("key", "revoke", new, "--yes") == f"{new} is revoked\n"
    assert f"404: key '{new}'" in used.refused("key", "revoke", new, "--yes")
    made = used.json("key", "create")
    assert used.json("key", "rotate", made["id"])["replaces"]["id"] == made["id"]
    assert used.json("key", "revoke", made["id"], "--yes") == {"revoked": made["id"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("create --scope everything", "422: body/scopes/0"),
        ("create --tenant nobody", "404: tenant 'nobody'"),
        ("create --expires 2031-01-01", "--expires: expected a span such as 30d, or a time with"),
        ("create --expires 2001-01-01T00:00:00Z", "422: expires_at: expected a time to come"),
        ("create --expires 999999999d", "--expires: expected"),
        ("rotate key-1", "422: path/key_id"),
        ("rotate key-0123456789abcdef --overlap long", "--overlap: expected seconds"),
    ],
)
def test_bad_key_is_one_line(used: Api, words: str, expected: str) -> None:
    assert expected in used.refused("key", *words.split())


# the audit log


def test_audit_shows_who_changed_what_and_why(api: Api) -> None:
    api.run("policy", "set", "default", "target_sparsity=0.5", "--reason", "INC-7 \x1b[2J")
    newest = api.json("audit", "--limit", "1")["items"][0]
    assert (newest["revision"], newest["reason"]) == (2, "INC-7 \x1b[2J")
    out = api.run("audit")
    assert lines(out)[:1] == lines("REVISION AT ACTOR ACTION CHANGED REASON")
    assert "PATCH /v1/policies/default  policy default" in out.splitlines()[1]
    assert out.splitlines()[1].endswith("INC-7 \\x1b[2J")  # a terminal must not obey it
    assert len(out.splitlines()) == 3
    assert "--limit: expected a whole number, 1 or more" in api.refused("audit", "--limit", "0")


# confirmation


class Keyboard:
    """A terminal that somebody types on."""

    def __init__(self, typed: str) -> None:
        self._typed = typed

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._typed


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def type_it(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Keyboard(text))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    return type_it


def test_delete_and_revoke_ask_on_a_terminal(api: Api, type_in: Callable[[str], None]) -> None:
    key = api.json("key", "create")["id"]
    for answer in ("n\n", "\n", ""):
        api.json("tenant", "create", "acme") if answer == "n\n" else None
        type_in(answer)
        for command in (("tenant", "delete", "acme"), ("key", "revoke", key)):
            status = main([*command, "--url", api.url, "--key-file", str(api.key_file)])
            out, err = api.capsys.readouterr()
            assert (status, out) == (2, "")
            assert "? [y/N] spin-server: " in err
            assert "nothing was done" in err
    type_in("y\n")
    for command in (("tenant", "delete", "acme"), ("key", "revoke", key)):
        assert main([*command, "--url", api.url, "--key-file", str(api.key_file)]) == 0
    out, err = api.capsys.readouterr()
    assert "tenant acme is gone" in out
    assert f"Revoke {key} (all tenants, scopes -, ends never)? [y/N] " in err


def test_delete_and_revoke_are_refused_without_a_terminal(api: Api) -> None:
    api.run("tenant", "create", "acme")
    key = api.json("key", "create")["id"]
    for command in (("tenant", "delete", "acme"), ("key", "revoke", key)):
        assert "expected --yes, or a terminal to ask on, got neither" in api.refused(*command)
    assert (len(api.json("tenant", "list")["items"]), len(api.json("key", "list")["items"])) == (
        1,
        2,
    )


# who may, and how it is told


def test_wrong_key_is_refused_without_being_shown(used: Api, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("spin_wrong\n")
    for command in COMMANDS:
        error = used.refused(*command.split(), key_file=wrong)
        assert "401: no such key, or one that has expired (the key came from --key-file" in error
        assert "spin_wrong" not in error


def test_missing_scope_is_told(used: Api, tmp_path: Path) -> None:
    reader = used.make_key(tmp_path, "--scope", "read")
    assert "target_sparsity" in used.run("policy", "get", "default", key_file=reader)
    for command, scope in (
        ("policy set default budget=uniform", "write"),
        ("policy revert 0", "write"),
        ("tenant create acme", "write"),
        ("key list", "keys"),
        ("key create", "keys"),
        ("audit", "audit"),
    ):
        error = used.refused(*command.split(), key_file=reader)
        assert f"403: this key may not {scope}: expected the scope '{scope}'" in error


def test_environment_names_server_and_key(
    used: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPIN_ADMIN_URL", used.url)
    monkeypatch.setenv("SPIN_ADMIN_KEY_FILE", str(used.key_file))
    assert main(["status"]) == 0
    monkeypatch.setenv("SPIN_ADMIN_KEY", "spin_wrong")  # the key itself comes first
    assert main(["status"]) == 2
    assert "(the key came from SPIN_ADMIN_KEY)" in capsys.readouterr().err
    assert main(["status", "--key-file", str(used.key_file)]) == 0


def test_no_key_says_where_one_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 2
    assert capsys.readouterr().err == (
        "spin-server: key: expected a file named by --key-file or SPIN_ADMIN_KEY_FILE, or a "
        "key in SPIN_ADMIN_KEY (the server writes its first one beside its store, as "
        "FILE.key), got none\n"
    )


@pytest.mark.parametrize("content", ["", "\n", "two words", "two\nlines", "k" * 201, "schlüssel"])
def test_file_without_a_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert main(["status", "--key-file", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.endswith("expected one line with a key, got something else\n")
    assert main(["status", "--key-file", str(tmp_path / "none")]) == 2
    assert "expected a readable file, got No such file" in capsys.readouterr().err


def test_key_in_the_wrong_place_is_not_shown(
    used: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--key-file", "spin_secret"]) == 2
    monkeypatch.setenv("SPIN_ADMIN_KEY_FILE", "spin_secret")
    assert main(["status"]) == 2
    assert main(["status", "--url", "http://127.0.0.1/?key=spin_secret"]) == 2
    assert main(["status", "--url", "http://me:spin_secret@127.0.0.1"]) == 2
    assert "spin_secret" not in capsys.readouterr().err
    assert "keys: expected a name or an id, got a key" in used.refused("key", "revoke", used.key)


# the server, and what else may answer


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_server_that_is_down_is_named_with_what_would_mend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("spin_key")
    url = f"http://127.0.0.1:{free_port()}"
    for command in ("status", "policy revert 0", "tenant delete acme --yes", "key create"):
        assert main([*command.split(), "--url", url, "--key-file", str(tmp_path / "key")]) == 3
        assert capsys.readouterr().err == (
            f"spin-server: {url}: expected the admin API, got Connection refused; start the server "
            "with --admin-store FILE, or say where it is with --url or SPIN_ADMIN_URL\n"
        )


def test_change_that_the_engine_does_not_take_is_no_success(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.engine.broken = True
    monkeypatch.setattr(context, "APPLY_SECONDS", 0.3)
    status, out, err = api.call("policy", "set", "default", "target_sparsity=0.5")
    assert status == 3
    assert "0.3 (launch)  ->  0.5 (default)" in out
    assert out.endswith("\nstored, not in force yet\n")
    assert "revision 2 is stored: expected the engine to take it, got " in err
    out = api.run("status")
    assert "engine: RuntimeError: out of order" in out
    assert "applied   revision 1, for" in out


class Other(http.server.BaseHTTPRequestHandler):
    """Something else than the admin API."""

    answer: ClassVar[tuple[int, str, bytes]]
    seen: ClassVar[list[str]]

    def do_GET(self) -> None:
        code, media, body = self.answer
        self.seen.append(self.path)
        body = body.replace(b"ECHO", (self.headers["Authorization"] or "").encode())
        self.send_response(code)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    """Where something else listens."""
    Other.seen = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


PROBLEM = "application/problem+json"


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        ((200, "text/html", b"<html>"), 2, "200 OK, which is not its answer"),
        ((200, "application/json", b"[1]"), 2, "200 OK, which is not its answer"),
        ((302, "text/html", b""), 2, "302 Found, which is not its answer"),
        ((404, "application/json", b'{"detail": "Not Found"}'), 2, "404 Not Found, which is not"),
        ((502, "text/html", b"<html>"), 3, "got 502 Bad Gateway"),
        ((503, PROBLEM, b'{"detail": "nothing was written: locked"}'), 3, "503: nothing was wri"),
        ((415, PROBLEM, b'{"detail": "expected application/json"}'), 2, "415: expected applica"),
        (
            (400, PROBLEM, b'{"detail": "no: ECHO\\n\\u001b[2J"}'),
            2,
            "400: no: Bearer [key]\\n\\x1b",
        ),
    ],
)
def test_other_answers_are_one_line(
    other: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: tuple[int, str, bytes],
    status: int,
    expected: str,
) -> None:
    Other.answer = answer
    (tmp_path / "key").write_text("spin_secret")
    got = main(["status", "--url", f"{other}/base", "--key-file", str(tmp_path / "key")])
    error = capsys.readouterr().err
    assert (got, error.count("\n")) == (status, 1)
    assert expected in error
    assert "spin_secret" not in error
    assert Other.seen == ["/base/v1/status"]  # and no redirect was followed


def test_change_without_an_answer_may_have_been_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_client, "TIMEOUT_SECONDS", 0.2)
    (tmp_path / "key").write_text("spin_key")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["key", "create", "--url", url, "--key-file", str(tmp_path / "key")]) == 3
    error = capsys.readouterr().err
    assert f"POST /v1/keys at {url}: expected an answer, got nothing for 0 seconds" in error
    assert "it may have been done all the same: see `spin-server audit`\n" in error


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://192.0.2.1:8081", "https unless the host is loopback"),
        ("http://localhost.example", "https unless the host is loopback"),
        ("http://127.0.0.1.example", "https unless the host is loopback"),
        ("http://0.0.0.0:1", "https unless the host is loopback"),
        ("127.0.0.1:8081", "http://HOST:PORT or https://HOST:PORT"),
        ("localhost:8081", "http://HOST:PORT or https://HOST:PORT"),
        ("ftp://localhost", "http://HOST:PORT or https://HOST:PORT"),
        ("http://localhost:x", "http://HOST:PORT or https://HOST:PORT"),
        ("", "http://HOST:PORT or https://HOST:PORT"),
    ],
)
def test_key_is_not_sent_where_it_can_be_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    expected: str,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it was tried"))
    (tmp_path / "key").write_text("spin_key")
    assert main(["status", "--url", url, "--key-file", str(tmp_path / "key")]) == 2
    assert f"URL of the admin API: expected {expected}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "insecure"),
    [
        ("http://0.0.0.0:1", True),
        ("http://localhost:1", False),
        ("http://127.9.9.9:1", False),
        ("http://[::1]:1", False),
        ("https://127.0.0.1:1", False),
    ],
)
def test_key_is_sent_to_loopback_by_https_or_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, insecure: bool
) -> None:
    (tmp_path / "key").write_text("spin_key")
    more = ["--insecure"] if insecure else []
    assert main(["status", "--url", url, "--key-file", str(tmp_path / "key"), *more]) == 3
    assert f"{url}: expected the admin API, got" in capsys.readouterr().err


def test_default_url_is_where_the_server_listens() -> None:
    assert f"http://127.0.0.1:{DEFAULT_PORT}" == admin_client.DEFAULT_URL


def test_commands_import_neither_server_nor_engine(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("spin_key")
    code = (
        "import sys; from spin_server.cli.main import main, build_parser; build_parser()\n"
        "print('httpx' in sys.modules); main(sys.argv[1:])\n"
        "print({'fastapi', 'pydantic', 'torch', 'uvicorn', 'vllm'} & sys.modules.keys())"
    )
    command = ["status", "--url", "http://127.0.0.1:1", "--key-file", str(tmp_path / "key")]
    run = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\nset()\n", run.stderr
