"""A thousand requests that come, are aborted, preempted and continued: no history is mixed up."""

import collections
import concurrent.futures
import random
import time
from pathlib import Path
from typing import Any

import live_server
from live_server import LiveServer
from recorded import replayed, write_policies

from spin_server.algorithm.options import SpinOptions

REQUESTS, AT_ONCE, PLACES, SEED = 1000, 80, 48, 5
# A shared document, whole blocks of the prefix cache; what follows is each request's own.
DOCUMENT = [2 + (i * 7919 + i // 97) % 250 for i in range(9 * 256)]
POLICIES: dict[str, dict[str, Any]] = {
    "gentle": {"sparsity": "0.3", "exploration": "0.05"},
    "aged": {"sparsity": "0.5", "exploration": "0.2", "exploration_policy": "block_age"},
    "stale": {"sparsity": "0.65", "exploration": "0.1", "exploration_policy": "staleness"},
    "all": {"sparsity": "0", "exploration": "0.3"},
}


def converse(server: LiveServer, number: int) -> int:
    """One to three requests of one conversation; returns how many."""
    rng = random.Random(number)
    # Some start below the 2,052 tokens where the indexer is first called, and grow past them.
    start = rng.choice((len(DOCUMENT), len(DOCUMENT), 8 * 256))
    tokens = DOCUMENT[:start] + [rng.randrange(2, 250) for _ in range(rng.randrange(1, 60))]
    if rng.random() < 0.1:  # too short to hold a slot
        tokens = [2 + rng.randrange(200) for _ in range(rng.randrange(1, 4))]
    longest, turns = rng.choice(((90, 1), (40, 1), (40, 2), (40, 3)))
    # The first come together, and their long answers outgrow the KV pool: some are preempted.
    first = number < AT_ONCE
    if first:
        tokens, turns = [*DOCUMENT, 2 + number], 1
    for turn in range(turns):
        body = {
            "prompt": tokens,
            "max_tokens": 220 if first else rng.randrange(1, longest),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {"spin_policy": list(POLICIES)[(number + turn) % len(POLICIES)]},
        }
        if not first and rng.random() < 0.25:  # hang up after a while
            with server.open("/v1/completions", {**body, "stream": True}, 900) as response:
                for _ in range(rng.randrange(1, 20)):
                    if not response.readline():
                        break
            return turn + 1
        answer = server.post("/v1/completions", body, timeout=900)["choices"][0]
        tokens = tokens + answer["token_ids"] + [rng.randrange(2, 250) for _ in range(8)]
    return turns


def test_no_history_is_leaked_or_mixed_up(tiny_model: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    write_policies(tmp_path / "policies.yaml", POLICIES)
    arguments = (
        *("--max-model-len", "2560", "--max-num-seqs", "64", "--num-gpu-blocks-override", "1000"),
        *("--spin-policies", str(tmp_path / "policies.yaml")),
        *("--spin-allow-request-policy", "--spin-seed", str(SEED)),
        *("--spin-places", str(PLACES), "--spin-record", str(traces)),
        *("--spin-record-requests", str(2 * REQUESTS)),
    )
    with live_server.running(tiny_model, tmp_path / "log", *arguments) as server:
        sent, conversations = 0, iter(range(10**9))
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            running = {pool.submit(converse, server, next(conversations)) for _ in range(AT_ONCE)}
            while running:
                done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for future in done:
                    sent += future.result()
                    if sent < REQUESTS:
                        running.add(pool.submit(converse, server, next(conversations)))
        deadline = time.monotonic() + 60
        while True:
            metrics = server.metrics()
            in_use = sum(v for k, v in metrics.items() if k.startswith("spin_state_slots_in_use"))
            if in_use == 0:
                break
            assert time.monotonic() < deadline, f"{in_use} slots are still held"
            time.sleep(1)
        resets = {
            reason: sum(v for k, v in metrics.items() if f'reason="{reason}"' in k)
            for reason in ("prefill", "preemption", "discontinuity")
        }
        placeless = sum(v for k, v in metrics.items() if 'reason="no_place"' in k)
        shortest = [v for k, v in metrics.items() if k.startswith("spin_min_context_tokens")]
        log = server.log.read_text(errors="replace")

    assert sent >= REQUESTS
    assert shortest == [2048]  # on a CPU, what the indexer keeps anyway
    assert resets["preemption"] >= 5, resets
    assert resets["discontinuity"] == 0, resets
    assert placeless > 0  # more requests than places, for a while
    assert "Traceback" not in log
    kinds: collections.Counter[str] = collections.Counter()
    for path in traces.glob("*.npz"):
        steps = replayed(path, SpinOptions(seed=SEED), POLICIES)[0]
        kinds["requests"] += 1
        kinds["sparse"] += sum(not step.dense for step in steps)
        kinds["started anew"] += sum(step.dense for step in steps[1:])
    assert kinds["requests"] > REQUESTS // 2, kinds
    assert kinds["sparse"] > 5 * REQUESTS, kinds
    assert kinds["started anew"] > 0, kinds  # preempted in the middle
