"""A real spin-server on a free port, started as a user would start it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COMMAND = str(Path(sys.executable).with_name("spin-server"))
START_SECONDS = 300
MODEL = "tiny"
# Triton's interpreter is for our kernels' own tests.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class LiveServer:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(
        self, path: str, body: dict[str, Any], timeout: float = 300, key: str | None = None
    ) -> dict[str, Any]:
        with self.open(path, body, timeout, key) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def open(
        self, path: str, body: dict[str, Any], timeout: float = 300, key: str | None = None
    ) -> Any:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = json.dumps({"model": MODEL, **body}).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return urllib.request.urlopen(request, timeout=timeout)

    def complete(
        self, prompt: str | list[int], key: str | None = None, **options: Any
    ) -> dict[str, Any]:
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
        return self.post("/v1/completions", body, key=key)

    def healthy(self) -> bool:
        with urllib.request.urlopen(self.url + "/health", timeout=10) as response:
            return bool(response.status == 200)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name with labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def engine_process(self, title: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.cmdline()[:1] == [title]:
                return child
        raise AssertionError(f"no process {title}")


def start(
    model: Path, log: Path, *arguments: str, environment: dict[str, str] | None = None
) -> LiveServer:
    """Start a server without waiting for it."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(COMMAND, "serve", str(model), "--port", str(port)),
                *("--served-model-name", MODEL, "--kv-cache-memory-bytes", str(2**30)),
                *arguments,
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    return LiveServer(process, port, log)


def wait_until_ready(server: LiveServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while b"spin-server: ready at" not in server.log.read_bytes():
        assert server.process.poll() is None, server.log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, server.log.read_text(errors="replace")[-4000:]
        time.sleep(0.2)


def stop(server: LiveServer) -> int:
    """Ask the server to stop; whatever is left of its session is killed."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(60)


@contextmanager
def running(model: Path, log: Path, *arguments: str, **options: Any) -> Iterator[LiveServer]:
    server = start(model, log, *arguments, **options)
    try:
        wait_until_ready(server)
        yield server
    finally:
        stop(server)
