"""A simulator of what the store uses of a Kubernetes API server; no real one can be had here.

ConfigMaps and Secrets over HTTP with optimistic concurrency, watches with a history that is
compacted, the server's limit of size, and tokens. It can be told to fail: before or after it has
carried a request out.
"""

import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-service-account"
MOST_BYTES = 1_048_576
KINDS = {"configmaps": "ConfigMap", "secrets": "Secret"}
Object = dict[str, Any]


class Refused(Exception):  # noqa: N818
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message,
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # somebody hung up
            super().handle_error(*arguments)


class KubeApi:
    """An API server with nothing in it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.requests: list[tuple[str, str]] = []  # verb, plural
        self.forbidden: set[tuple[str, str]] = set()
        # Asked before and after each request is carried out; may raise `Refused`, or
        # ConnectionError for an answer that is lost.
        self.interfere: Callable[[str, str, str], None] = lambda when, verb, plural: None
        self.instead: bytes | None = None  # what a proxy answers to everything
        self._version, self._compacted = 100, 0
        self._history: list[tuple[int, str, str, Object]] = []
        self._changed = threading.Condition()
        api = self

        class Handler(_Handler):
            server_api = api

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        with self._changed:
            self._version = -1  # ends the watches
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig"
        named = {"cluster": {"server": self.url}, "name": "it"}
        user = {"user": {"token": TOKEN}, "name": "it"}
        context = {"context": {"cluster": "it", "user": "it"}, "name": "it"}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [named],
                    "users": [user],
                    "contexts": [context],
                    "current-context": "it",
                }
            )
        )
        return path

    def compact(self) -> None:
        """Forget the history, so that older watches are told that they are too old."""
        with self._changed:
            self._compacted = self._version
            self._history.clear()

    def data(self, plural: str, name: str = "spin") -> dict[str, str]:
        return dict(self.objects[plural, name].get("data") or {})

    def edit(self, plural: str, change: Callable[[dict[str, str]], object]) -> None:
        """Change an object behind the store's back, as `kubectl edit` would."""
        with self._changed:
            found = json.loads(json.dumps(self.objects[plural, "spin"]))
            found.setdefault("data", {})
            change(found["data"])
            self._put("MODIFIED", plural, found)

    def delete(self, plural: str) -> None:
        with self._changed:
            self._put("DELETED", plural, self.objects[plural, "spin"])
            del self.objects[plural, "spin"]

    def handle(self, verb: str, plural: str, name: str | None, body: Object | None) -> Object:
        with self._changed:
            self.requests.append((verb, plural))
            if (verb, plural) in self.forbidden:
                raise Refused(403, "Forbidden", f"cannot {verb} resource {plural!r}")
            self.interfere("before", verb, plural)
            answer = self._carry_out(verb, plural, name, body)
            self.interfere("after", verb, plural)
            return answer

    def _carry_out(self, verb: str, plural: str, name: str | None, body: Object | None) -> Object:
        if verb == "create":
            assert body is not None
            name = body["metadata"]["name"]
            if (plural, name) in self.objects:
                raise Refused(409, "AlreadyExists", f"{plural} {name!r} already exists")
            return self._put("ADDED", plural, body)
        assert name is not None
        found = self.objects.get((plural, name))
        if found is None:
            raise Refused(404, "NotFound", f"{plural} {name!r} not found")
        if verb == "get":
            return found
        assert body is not None
        known = body["metadata"].get("resourceVersion")
        if known is not None and known != found["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified")
        if {**body, "metadata": None} == {**found, "metadata": None}:
            return found
        return self._put("MODIFIED", plural, body)

    def _put(self, event: str, plural: str, body: Object) -> Object:
        data = body.get("data") or {}
        for value in data.values():
            if not isinstance(value, str):
                raise Refused(400, "BadRequest", "data: expected strings")
            if plural == "secrets":
                base64.b64decode(value, validate=True)
        size = sum(
            len(base64.b64decode(value) if plural == "secrets" else value.encode())
            for value in data.values()
        )
        if size > MOST_BYTES:
            raise Refused(422, "Invalid", f"{KINDS[plural]}: Too long: at most {MOST_BYTES} bytes")
        self._version += 1
        stored = json.loads(json.dumps(body))
        stored |= {"kind": KINDS[plural], "apiVersion": "v1"}
        stored["metadata"]["resourceVersion"] = str(self._version)
        self.objects[plural, stored["metadata"]["name"]] = stored
        self._history.append((self._version, event, plural, stored))
        self._changed.notify_all()
        return stored

    def begin_watch(self, plural: str) -> None:
        """Refuse a watch that cannot be."""
        with self._changed:
            self.requests.append(("watch", plural))
            if ("watch", plural) in self.forbidden:
                raise Refused(403, "Forbidden", f"cannot watch resource {plural!r}")
            self.interfere("before", "watch", plural)

    def events(
        self, plural: str, name: str, version: int | None, seconds: float
    ) -> Iterator[Object]:
        """Yield the events after a version, for a while; without one, what there is comes first."""
        end = time.monotonic() + seconds
        if version is None:
            with self._changed:
                version, found = self._version, self.objects.get((plural, name))
            if found is not None:
                yield {"type": "ADDED", "object": found}
        while (left := end - time.monotonic()) > 0:
            with self._changed:
                if self._version < 0:
                    return
                if version < self._compacted:
                    yield {
                        "type": "ERROR",
                        "object": Refused(410, "Expired", "too old resource version").status,
                    }
                    return
                found = [event for event in self._history if event[0] > version]
                if not found:
                    self._changed.wait(left)
                    continue
            for at, event, of, stored in found:
                version = at
                if of == plural and stored["metadata"]["name"] == name:
                    yield {"type": event, "object": stored}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server_api: KubeApi

    def log_message(self, *_: Any) -> None:
        pass

    def _run(self, verb: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        address = urlsplit(self.path)
        plural, _, name = address.path.removeprefix("/api/v1/namespaces/llm/").partition("/")
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if verb == "get" and query.get("watch", "").lower() == "true":
                self._stream(plural, query)
                return
            found = self.server_api.handle(verb, plural, name or None, body)
            self._answer(201 if verb == "create" else 200, found)
        except Refused as refused:
            self._answer(refused.status["code"], refused.status)
        except ConnectionError:
            self.close_connection = True

    def _answer(self, code: int, body: Object) -> None:
        text = self.server_api.instead or json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, plural: str, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"]) if "resourceVersion" in query else None
        self.server_api.begin_watch(plural)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        name = query["fieldSelector"].removeprefix("metadata.name=")
        seconds = float(query["timeoutSeconds"])
        for event in self.server_api.events(plural, name, version, seconds):
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def do_GET(self) -> None:
        self._run("get")

    def do_POST(self) -> None:
        self._run("create")

    def do_PUT(self) -> None:
        self._run("update")


@contextmanager
def kube_api() -> Iterator[KubeApi]:
    api = KubeApi()
    try:
        yield api
    finally:
        api.close()
