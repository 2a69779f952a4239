"""Run a fixed schedule of requests through an engine whose steps this process drives.

A server's batches depend on when requests arrive, and a batch's composition moves near-ties in
vLLM itself. Here every run sees the same batches, so that tokens can be compared one for one.

Run: python offline_engine.py MODEL SETTINGS.json OUT.json
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Request, the step at which it arrives, prompt tokens, tokens to generate. Prompts share prefixes,
# so later ones meet the prefix cache; long ones are prefilled in chunks beside decoding ones.
SCHEDULE = [
    ("long", 0, 3000, 60),
    ("short", 0, 12, 50),
    ("crossing", 3, 2040, 60),  # grows past 2,052 tokens, where the indexer starts to be called
    ("chunked", 6, 6000, 40),
    ("tail", 20, 2817, 30),  # all but its last token are cached: a prompt's row that decodes
    ("chunked again", 24, 6100, 5),
    ("one", 25, 1, 12),  # no slot to see, beside a prefill that calls the indexer
    ("cached", 45, 3000, 40),
]
TURNS = 3


def prompt(length: int) -> list[int]:
    return [2 + (i * 7919 + i // 97) % 250 for i in range(length)]


def run(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens of every request and of a conversation of several turns; SPIN's counters."""
    from spin_server.engine.spin.settings import SpinSettings
    from spin_server.engine.stepped import stepped_engine

    engine = stepped_engine(
        model,
        SpinSettings.model_validate(settings),
        max_model_len=8192,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
    )
    from vllm import SamplingParams

    tokens: dict[str, list[int]] = {}

    def add(name: str, token_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": token_ids}, params)

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)

    number, waiting = 0, list(SCHEDULE)
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1] <= number:
            name, _, length, max_tokens = waiting.pop(0)
            add(name, prompt(length), max_tokens)
        step()
        number += 1
    conversation = prompt(2500)
    for turn in range(TURNS):
        add(f"turn {turn}", conversation, 30)
        while engine.has_unfinished_requests():
            step()
        conversation = [*conversation, *tokens[f"turn {turn}"], *prompt(40)]
    snapshot = engine.collective_rpc("spin_snapshot")[0]
    return {"tokens": tokens, "snapshot": snapshot}


def run_apart(model: Path, settings: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """The same in a process of its own, with that many threads."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(
            [
                sys.executable,
                __file__,
                str(model),
                str(folder / "settings.json"),
                folder / "out",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "TRITON_INTERPRET": "0",
            },
            timeout=600,
        )
    assert ended.returncode == 0, (folder / "log").read_text(errors="replace")[-4000:]
    found: dict[str, Any] = json.loads((folder / "out").read_text())
    return found


if __name__ == "__main__":
    _, model, settings, out = sys.argv
    found = run(model, json.loads(Path(settings).read_text()))
    Path(out).write_text(json.dumps(found))
