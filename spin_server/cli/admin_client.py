"""A client of the admin API: one request at a time, and every failure one line.

httpx is imported where it is used, for that takes longer than all the rest of a command.
"""

import argparse
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from spin_server import __version__
from spin_server.admin.location import is_loopback
from spin_server.environment import read_admin_variables
from spin_server.errors import InputError, SpinError

DEFAULT_URL = "http://127.0.0.1:8081"  # where `spin-server serve --admin-store` listens
TIMEOUT_SECONDS = 30.0  # the API itself waits 4 seconds for the engine
PAGE_ITEMS = 500  # as many as the API gives
_MOST_KEY_BYTES = 200  # as many as the API reads
_KEY_PREFIX = "spin_"


class NoAnswerError(SpinError):
    """The admin API does not answer, or cannot do now what it was asked for."""


def printable(text: object) -> str:
    """Escape what is not printable: others wrote it, and a terminal would obey it."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


@dataclass(frozen=True, slots=True)
class Key:
    """The caller's key.

    Args:
        text: the key; never shown.
        source: where it came from, in words.
    """

    text: str = field(repr=False)
    source: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API answered.

    Args:
        body: the JSON object.
        etag: of the document that was read or written; may be empty.
    """

    body: dict[str, Any]
    etag: str


class AdminClient:
    """Speaks to the admin API.

    Args:
        url: where it is.
        key: the caller's.
        insecure: send the key over plain http to any host.

    Raises:
        InputError: a URL that is none, or that a key must not be sent to.
    """

    def __init__(self, url: str, key: Key, *, insecure: bool = False) -> None:
        import httpx

        secure = _check_url(url, insecure)
        self.url, self._key = url, key
        self._http = httpx.Client(
            base_url=url,
            headers={
                "Authorization": f"Bearer {key.text}",
                "User-Agent": f"spin-server/{__version__}",
            },
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,  # a redirect would take the key elsewhere
            # Proxies named in the environment are not used: one would see the key, and loopback
            # is not reached through it. The certificates that the system or SSL_CERT_FILE trusts
            # still count, since OpenSSL itself reads that variable.
            trust_env=False,
            verify=ssl.create_default_context() if secure else False,
        )

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def uses(self, prefix: str) -> bool:
        """Say whether the caller's key begins like this."""
        return self._key.text.startswith(prefix)

    def get(self, *parts: str, **query: str | int | None) -> Answer:
        """Read what is at /v1/PART/PART..."""
        return self.send("GET", *parts, query=query)

    def items(self, *parts: str, most: int | None = None) -> dict[str, Any]:
        """Read a list, page by page.

        Args:
            most: items to read; None: all.

        Returns:
            The same as one page that holds them all.
        """
        found: list[Any] = []
        cursor: str | None = None
        while True:
            limit = PAGE_ITEMS if most is None else min(PAGE_ITEMS, most - len(found))
            page = self.get(*parts, limit=limit, cursor=cursor).body
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None or len(found) == most:
                return {"items": found, "next_cursor": cursor}

    def send(
        self,
        method: str,
        *parts: str,
        body: dict[str, Any] | None = None,
        if_match: str | None = None,
        query: Mapping[str, str | int | None] | None = None,
    ) -> Answer:
        """Send a request to /v1/PART/PART...; parts of the query that are None are left out.

        Raises:
            InputError: the API refuses it, or what answers is no admin API.
            NoAnswerError: nobody answers, or the API cannot do it now.
        """
        import httpx

        for part in parts:
            if part in ("", ".", "..") or part.startswith(_KEY_PREFIX):
                got = "a key" if part.startswith(_KEY_PREFIX) else repr(part)
                raise InputError(parts[0], "a name or an id", got)
        try:
            path = "/".join(("/v1", *(quote(part, safe="") for part in parts)))
            answer = self._http.request(
                method,
                path,
                json=body,
                params={name: value for name, value in (query or {}).items() if value is not None},
                headers={} if if_match is None else {"If-Match": if_match},
            )
        except httpx.HTTPError as error:
            raise self._no_answer(method, path, error) from None
        except (UnicodeError, httpx.InvalidURL):
            raise InputError("arguments", "text in UTF-8, and not too much", "another") from None
        if not answer.is_success:
            raise self._refusal(f"{method} {path}", answer)
        found = _read(answer)
        if found is None:
            raise self._not_ours(f"{method} {path}", answer)
        return Answer(found, answer.headers.get("etag", ""))

    def _no_answer(self, method: str, path: str, error: Exception) -> NoAnswerError:
        import httpx

        reason = re.sub(r"^\[Errno -?\d+\] ", "", self._clean(error)) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            reason = f"nothing for {TIMEOUT_SECONDS:.0f} seconds"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NoAnswerError(
                f"{self.url}: expected the admin API, got {reason}; start the server with "
                "--admin-store FILE, or say where it is with --url or SPIN_ADMIN_URL"
            )
        text = f"{method} {path} at {self.url}: expected an answer, got {reason}"
        if method != "GET":
            text += "; it may have been done all the same: see `spin-server audit`"
        return NoAnswerError(text)

    def _refusal(self, what: str, answer: Any) -> SpinError:
        found = _read(answer)
        if found is None or "problem+json" not in answer.headers.get("content-type", ""):
            return self._not_ours(what, answer)
        got = f"{answer.status_code}: {self._clean(found.get('detail', found.get('title')))}"
        if answer.status_code == 401:
            got += f" (the key came from {self._key.source})"
        if answer.status_code >= 500:
            return NoAnswerError(f"{what}: expected success, got {got}")
        return InputError(what, "success", got)

    def _not_ours(self, what: str, answer: Any) -> SpinError:
        """Say that something answers, but not the admin API."""
        got = f"{answer.status_code} {self._clean(answer.reason_phrase)}".strip()
        text = f"the admin API at {self.url} (see --url)"
        if answer.status_code >= 500:
            return NoAnswerError(f"{what}: expected {text}, got {got}")
        return InputError(what, text, f"{got}, which is not its answer")

    def _clean(self, text: object) -> str:
        return printable(str(text).replace(self._key.text, "[key]"))


def _read(answer: Any) -> dict[str, Any] | None:
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_url(text: str, insecure: bool) -> bool:
    """Refuse a URL that a key must not be sent to; say whether it is https."""
    import httpx

    name, expected = "URL of the admin API", "http://HOST:PORT or https://HOST:PORT"
    try:
        url = httpx.URL(text)  # read as it will be used
    except (httpx.InvalidURL, UnicodeError):
        raise InputError(name, expected, "one that cannot be read") from None
    if url.userinfo or url.query or url.fragment:
        # Not shown: a password or a key may be in it.
        raise InputError(name, expected, "one with a user, a query or a fragment")
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(name, expected, repr(text))
    if url.scheme == "http" and not insecure and not is_loopback(url.host):
        raise InputError(
            name,
            "https unless the host is loopback, for a key sent over plain http can be read on the "
            "way (--insecure sends it all the same)",
            printable(text),
        )
    return url.scheme == "https"


def _check_key(text: str, source: str) -> Key:
    key = text.strip()
    if not 0 < len(key) <= _MOST_KEY_BYTES or not all("!" <= c <= "~" for c in key):
        raise InputError(f"key from {source}", "one line with a key", "something else")
    return Key(key, source)


def _read_key(file: str, source: str) -> Key:
    if file.startswith(_KEY_PREFIX):
        raise InputError(source, "a file that holds the key", "a key")
    try:
        with open(file, "rb") as opened:
            content = opened.read(10 * _MOST_KEY_BYTES)  # it may be a device
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{source} {printable(file)}", "a readable file", reason) from None
    return _check_key(content.decode("latin-1"), f"{source} {printable(file)}")


def find_key(file: str | None) -> Key:
    """Find the caller's key.

    Args:
        file: `--key-file`; None: what the environment says.

    Raises:
        InputError: there is none, or it is none.
    """
    variables = read_admin_variables()
    if file is not None:
        return _read_key(file, "--key-file")
    if variables.key is not None:
        return _check_key(variables.key, "SPIN_ADMIN_KEY")
    if variables.key_file is not None:
        return _read_key(variables.key_file, "SPIN_ADMIN_KEY_FILE")
    raise InputError(
        "key",
        "a file named by --key-file or SPIN_ADMIN_KEY_FILE, or a key in SPIN_ADMIN_KEY (the server "
        "writes its first one beside its store, as FILE.key)",
        "none",
    )


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[AdminClient]:
    """Make a client from what `add_command` adds, and close it in the end."""
    url = args.url if args.url is not None else read_admin_variables().url or DEFAULT_URL
    client = AdminClient(url, find_key(args.key_file), insecure=args.insecure)
    try:
        yield client
    except KeyboardInterrupt:
        raise NoAnswerError(
            "interrupted; a change that was under way may have been made: see `spin-server audit`"
        ) from None
    finally:
        client.close()
