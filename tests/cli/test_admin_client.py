"""What the commands do with keys, servers and answers that are not as they should be."""

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from admin_commands import Api

from spin_server.admin.http import context
from spin_server.cli import admin_client
from spin_server.cli.admin_arguments import DEFAULT_PORT
from spin_server.cli.main import main

pytestmark = pytest.mark.usefixtures("nothing_set")


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


def test_wrong_key_is_refused_without_being_shown(used: Api, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("spin_wrong\n")
    for command in COMMANDS:
        error = used.refused(*command.split(), key_file=wrong)
        assert (
            "401: expected a key that is valid, got one that is unknown, revoked or expired "
            "(the key came from --key-file"
        ) in error
        assert "spin_wrong" not in error


def test_missing_scope_is_told(used: Api, tmp_path: Path) -> None:
    reader = used.make_key(tmp_path, "--scope", "read")
    assert "target_sparsity" in used.run("policy", "get", "default", key_file=reader)
    for command, scope, doing in (
        ("policy set default budget=uniform", "write", "write"),
        ("policy revert 0 --yes", "write", "write"),
        ("tenant create acme", "write", "write"),
        ("key list", "keys", "manage keys"),
        ("key create", "keys", "manage keys"),
        ("audit", "audit", "read the audit log"),
    ):
        error = used.refused(*command.split(), key_file=reader)
        assert f"403: this key may not {doing}: expected the scope '{scope}'" in error


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
