"""What the admin commands ask before they do it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from admin_commands import Api

from spin_server.cli.main import main

pytestmark = pytest.mark.usefixtures("nothing_set")


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


def test_last_tenant_goes_only_with_a_word_about_it(
    api: Api, type_in: Callable[[str], None], tmp_path: Path
) -> None:
    said = "no tenant is left: the serving API needs no key\n"
    api.run("tenant", "create", "acme")
    file = tmp_path / "bulk.json"
    file.write_text('{"operations": [{"op": "delete_tenant", "name": "acme", "if_match": "*"}]}')
    delete, revert = ("tenant", "delete", "acme"), ("policy", "revert", "1")
    for command in (delete, revert, ("bulk", str(file))):
        assert said in api.run(*command, "--dry-run")
        if command in (delete, revert):
            assert "expected --yes, or a terminal to ask on" in api.refused(*command)
    for command in (delete, revert):
        for answer, status in (("n\n", 2), ("y\n", 0)):
            type_in(answer)
            assert main([*command, "--url", api.url, "--key-file", str(api.key_file)]) == status
            out, err = api.capsys.readouterr()
            assert err.startswith(said)
            assert "? [y/N] " in err
            assert (said in out) == (status == 0)
        api.run("tenant", "create", "acme")
        assert said in api.run(*command, "--yes")
        api.run("tenant", "create", "acme")
    api.run("tenant", "create", "other")
    type_in("y\n")
    assert main([*delete, "--url", api.url, "--key-file", str(api.key_file)]) == 0
    out, err = api.capsys.readouterr()
    assert said not in out + err
    assert api.run("policy", "revert", str(api.json("status")["desired_revision"])).startswith("no")
