"""The commands for the admin API, against the real application."""

import io
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from admin_commands import Api, lines

from spin_server.cli import admin_client

pytestmark = pytest.mark.usefixtures("nothing_set")


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
        serving   needs no key: no tenants
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


def test_policy_set_lets_some_requests_try_first(api: Api) -> None:
    api.run("tenant", "create", "acme", "target_sparsity=0.4")
    out = api.run(
        "policy", "set", "acme", "target_sparsity=0.65", "probe_period=8", "--canary", "10"
    )
    tried = "10% of the requests: target_sparsity=0.65, probe_period=8"
    assert lines(out)[1] == ["tried", "by", "nobody", "->", *tried.split()]
    assert f"tried by {tried}" in api.run("policy", "get", "acme")
    out = api.run("policy", "set", "acme", "--canary", "50")
    assert "50% of the requests" in out
    diff = api.run("policy", "diff", "2")
    for words in (
        "canary_percent - -> 50",
        "canary probe_period - -> 8",
        "canary target_sparsity - -> 0.65",
    ):
        assert words.split() in lines(diff)
    out = api.run("policy", "set", "acme", "--canary", "100")
    assert ["target_sparsity", "0.4", "(tenant)", "->", "0.65", "(tenant)"] in lines(out)
    assert api.json("policy", "get", "acme")["canary"] is None
    assert "expected FIELD=VALUE, or --canary, got neither" in api.refused("policy", "set", "acme")


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
    refusal = used.refused(*change, key_file=writer)
    assert "this key may not read" in refusal
    assert "does with --if-match REV or '*'" in refusal
    out = used.run(*change, "--if-match", "*", key_file=writer)
    assert ["target_sparsity", "0.5", "default"] in lines(out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("target_sparsity=7", "422: target_sparsity: expected a number from 0 to 1, got 7"),
        ("target_sparsity=NaN", "target_sparsity: expected a number from 0 to 1, got 'NaN'"),
        ("probe_period=1.5", "422: probe_period: expected a whole number, got '1.5'"),
        ("nonsense=1", "'nonsense': expected one of target_sparsity, exploration_share,"),
        ("max_miss_rate=0.5", "guard rails do not exist in this release"),
        ("target_sparsity", "field: expected FIELD=VALUE, or FIELD= to take it back"),
        ("budget= budget=uniform", "field budget: expected one value, got two"),
        ("budget= --ttl soon", "--ttl: expected seconds, or a span such as"),
        ("budget= --ttl 0", "422: ttl_seconds: expected at least 1, got '0'"),
        ("budget= --canary ten", "--canary: expected a whole number, 0 or more, got 'ten'"),
        ("budget=uniform --canary 101", "422: canary_percent: expected at most 100, got '101'"),
        ("budget= --canary 10", "a canary needs something to try"),
        ("budget=uniform --canary 10 --ttl 1h", "expected ttl_seconds or canary_percent, got both"),
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
    out = api.run("policy", "revert", "1", "--reason", "INC-8", "--yes")
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
        TENANT  TARGET_SPARSITY  EXPLORATION_SHARE  GOES_BACK  CANARY  DESCRIPTION
        acme    0.65 (tenant)    0.05 (launch)      -          -       Search
    """)
    assert "description  Search" in api.run("tenant", "get", "acme")
    assert api.json("tenant", "get", "acme")["description"] == "Search"
    assert "409: tenant 'acme' exists" in api.refused("tenant", "create", "acme")
    out = api.run("policy", "set", "acme", "target_sparsity=")
    assert "0.65 (tenant)  ->  0.3 (launch)" in out
    out = api.run("tenant", "delete", "acme", "--yes", "--reason", "INC-9")
    assert out == (
        "no tenant is left: the serving API needs no key\n"
        "tenant acme is gone, in force in 1 worker\n"
    )
    assert "404: no tenant 'acme'" in api.refused("tenant", "get", "acme")
    assert api.json("tenant", "create", "acme")["applied"]["complete"] is True
    assert api.json("tenant", "delete", "acme", "--yes")["deleted"] == "acme"


def test_tenant_is_described(api: Api) -> None:
    api.run("tenant", "create", "acme", "--description", "Search")
    out = api.run("tenant", "describe", "acme", "Search, and ads", "--dry-run")
    assert lines(out)[1] == ["description", "Search", "->", "Search,", "and", "ads"]
    assert out.endswith("dry run: nothing was changed\n")
    out = api.run("tenant", "describe", "acme", "Search, and ads", "--reason", "INC-3")
    assert lines(out)[:2] == [
        ["tenant", "acme,", "revision", "3"],
        ["description", "Search,", "and", "ads"],
    ]
    assert api.json("tenant", "describe", "acme", "")["description"] == ""
    out = api.run("tenant", "limit", "acme", "concurrent_requests=8", "context_tokens=9000")
    assert ["concurrent_requests", "8"] in lines(out)
    assert ["context_tokens", "9000"] in lines(api.run("tenant", "get", "acme"))
    found = api.json("tenant", "limit", "acme", "concurrent_requests=")
    assert found["limits"]["concurrent_requests"] is None
    assert "422: limits/concurrent_requests: expected at least 1, got 0" in api.refused(
        "tenant", "limit", "acme", "concurrent_requests=0"
    )
    assert "404: no tenant 'nobody'" in api.refused("tenant", "describe", "nobody", "x")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("tenant create new target_sparsity=0", "policy new is new"),
        ("tenant describe acme Ads", "Search  ->  Ads"),
        ("tenant limit acme queued_tokens=5", "tenant acme"),
        ("tenant delete acme", "policy acme is gone"),
        ("key create --tenant acme", "is new"),
        ("key rotate ID", "replaced_by"),
        ("key revoke ID", "is gone"),
    ],
)
def test_every_change_can_be_tried(api: Api, words: str, shown: str) -> None:
    api.run("tenant", "create", "acme", "--description", "Search", "target_sparsity=0.5")
    made = api.json("key", "create", "--tenant", "acme")
    api.secrets.append(made["key"])
    command = [made["id"] if word == "ID" else word for word in words.split()]
    before = api.json("audit")
    out = api.run(*command, "--dry-run")
    assert shown in out
    assert out.endswith("dry run: nothing was changed\n")
    assert api.json(*command, "--dry-run")["dry_run"] is True
    assert api.json("audit") == before


def test_document_without_a_difference_to_be_seen_shows_none(api: Api) -> None:
    out = api.run("tenant", "create", "acme", "--dry-run")
    assert out.startswith("tenant acme is new\n  created_at")


def test_what_is_not_to_last_is_in_the_status_and_the_list(api: Api) -> None:
    for name in ("acme", "other"):
        api.run("tenant", "create", name)
    api.run("policy", "set", "acme", "target_sparsity=0.5", "--ttl", "1h")
    api.run("policy", "set", "other", "target_sparsity=0.5", "--canary", "10")
    end = api.json("policy", "get", "acme")["expires_at"]
    status = lines(api.run("status"))
    assert ["goes", "back", "acme", "at", end] in status
    assert ["canaries", "other", "10%"] in status
    assert ["serving", "needs", "a", "key"] in status
    (_, acme, other) = lines(api.run("tenant", "list"))
    assert (acme[-3:], other[-3:]) == ([end, "-", "-"], ["-", "10%", "-"])


def test_policy_that_inherits_again_is_not_called_gone(api: Api) -> None:
    api.run("tenant", "create", "acme")
    api.run("policy", "set", "acme", "target_sparsity=0.5")
    api.run("policy", "set", "default", "target_sparsity=0.4")
    out = api.run("policy", "revert", "2", "--dry-run")
    assert "policy acme inherits all again\n" in out
    assert "policy default is as launched again\n" in out
    assert "gone" not in out
    assert "policy acme is gone" in api.run("tenant", "delete", "acme", "--dry-run")


def test_revert_says_what_is_not_brought_back(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.run("policy", "set", "default", "target_sparsity=0.5", "--ttl", "1h")
    api.run("policy", "set", "default", "target_sparsity=0.4", "probe_period=8")
    administration, clock = api.server.administration, api.server.administration.clock
    monkeypatch.setattr(administration, "clock", lambda: clock() + timedelta(hours=2))
    said = "what was set until a time that has passed is not brought back: default\n"
    for more in (["--dry-run"], []):
        out = api.run("policy", "revert", "2", *more)
        assert said in out
        assert ["target_sparsity", "0.4", "->", "-"] in lines(out)
    out = api.run("policy", "revert", "2")
    assert out == said + "nothing changes\n"


# several changes at once


def test_bulk_makes_all_changes_or_none(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "changes.json"
    create = {"op": "create_tenant", "name": "acme"}
    patch = {"op": "patch_policy", "name": "acme", "if_match": "*"}
    wanted = {"operations": [create, {**patch, "patch": {"target_sparsity": 0.5}}]}
    file.write_text(json.dumps(wanted))
    out = api.run("bulk", str(file), "--dry-run")
    assert "tenant acme is new" in out
    assert out.endswith("dry run: nothing was changed\n")
    assert "policy acme is new\n  target_sparsity  -  ->  0.5\n" in api.run("bulk", str(file))
    assert "409: tenant 'acme' exists" in api.refused("bulk", str(file), "--reason", "again")
    gone = {"operations": [{"op": "delete_tenant", "name": "acme", "if_match": "*"}]}
    typed = io.TextIOWrapper(io.BytesIO(json.dumps(gone).encode()))
    monkeypatch.setattr(sys, "stdin", typed)
    assert api.json("bulk", "-")["revision"] == 3
    assert [r["revision"] for r in api.json("revisions")["items"]] == [3, 2, 1]
    out = api.run("revisions", "--limit", "2")
    assert lines(out)[0] == lines("REVISION AT ACTOR ACTION CHANGED REASON")[0]
    assert "POST /v1/bulk  policy acme, tenant acme" in out.splitlines()[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected JSON"),
        ("[]", "expected an object"),
        ("[" * 100_000, "expected JSON"),
        ('{"operations": [], "operations": []}', "member 'operations' comes twice"),
        ('{"operations": []}', "422: operations: expected at least 1 of them, got 0"),
        (
            '{"operations": [{"op": "nothing", "name": "x"}]}',
            "422: operations/0: expected one of 'patch_policy', ",
        ),
        (b"\xff", "a file in UTF-8"),
        (None, "No such file"),
        ('{"operations": []}' + " " * 2**20, "at most 1,048,576 bytes, as the API takes, got more"),
    ],
)
def test_bad_bulk_is_one_line(
    used: Api, tmp_path: Path, text: str | bytes | None, expected: str
) -> None:
    file = tmp_path / "changes.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert expected in used.refused("bulk", str(file))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "create y canary=1",
            "field canary: expected --canary PERCENT beside the fields of `policy set`, "
            "got 'canary=1'",
        ),
        ("create y ttl=1h", "field ttl: expected --ttl TIME beside the fields of `policy set`"),
        ("create Not_A_Label", "422: name: expected a name of lower-case letters"),
        (
            "limit used foo=1",
            "limits: expected one of concurrent_requests, queued_tokens, context_tokens, got 'foo'",
        ),
        (
            "limit used queued_tokens=abc",
            "limits/queued_tokens: expected a whole number, got 'abc'",
        ),
        ("limit used queued_tokens=0", "limits/queued_tokens: expected at least 1, got 0"),
        (
            "limit default queued_tokens=9",
            "that is the policy of requests of no tenant, which have",
        ),
    ],
)
def test_bad_tenant_is_one_line(used: Api, words: str, expected: str) -> None:
    if "used" in words:
        used.call("tenant", "create", "used")
    assert expected in used.refused("tenant", *words.split())


def test_change_that_needs_reading_too_says_so(used: Api, tmp_path: Path) -> None:
    writer = used.make_key(tmp_path, "--scope", "write")
    for command in (
        "tenant describe acme x",
        "tenant limit acme queued_tokens=1",
        "tenant delete acme",
        "policy revert 1",
    ):
        refusal = used.refused(*command.split(), key_file=writer)
        assert "expected the scope 'read', for what is changed is read first\n" in refusal


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
