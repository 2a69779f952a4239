"""SPIN in the running engine: its choices are replay's, and its metrics count them."""

import collections
import concurrent.futures
import math
import time
import urllib.error
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import live_server
import numpy as np
import pytest
from live_server import LiveServer
from recorded import replayed, write_policies
from test_serving import text

from spin_server.algorithm.options import SpinOptions
from spin_server.cli.main import main
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

SEED = 11
POLICIES: dict[str, dict[str, Any]] = {
    "gentle": {"sparsity": "0.3", "exploration": "0.05"},
    "aged": {
        "sparsity": "0.4",
        "exploration": "0.2",
        "exploration_policy": "block_age",
        "ema_decay": "0.9",
    },
    "stale": {"sparsity": "0.5", "exploration": "0.2", "exploration_policy": "staleness"},
    "harsh": {"sparsity": "0.65", "exploration": "0.1", "ema_decay": "0.25"},
    "probing": {"sparsity": "0.5", "exploration": "0.05", "probe_period": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spin")


@pytest.fixture(scope="module")
def spin_server(folder: Path) -> Iterator[LiveServer]:
    model = folder / "model"
    overrides = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "index_n_heads": 8}
    write_checkpoint(model, tiny_config(overrides), seed=0)
    write_policies(folder / "policies.yaml", POLICIES)
    arguments = (
        *("--max-model-len", "16384", "--max-num-batched-tokens", "1024"),
        *("--spin-policies", str(folder / "policies.yaml"), "--spin-allow-request-policy"),
        *("--spin-record", str(folder / "traces"), "--spin-seed", str(SEED)),
    )
    with live_server.running(model, folder / "log", *arguments) as server:
        yield server


def test_engine_scores_what_replay_scores_and_counts_it(
    spin_server: LiveServer, folder: Path
) -> None:
    names = list(POLICIES)

    def ask(i: int) -> None:
        spin_server.complete(
            text(2300 + 700 * i, seed=i),
            max_tokens=40 + 7 * i,
            vllm_xargs={"spin_policy": names[i]},
        )

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(ask, range(len(names))))

    deadline = time.monotonic() + 30
    while len(paths := list((folder / "traces").glob("*.npz"))) < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    counted: collections.Counter[str] = collections.Counter()
    seen = set()
    for path in paths:
        with np.load(path) as recorded:
            name = names[int(recorded["policy"]) - 1]
            seen.add(name)
            assert recorded["layers"].tolist() == [1, 3]
            assert recorded["scores"].shape[1] >= 39
        records = replayed(path, SpinOptions(seed=SEED), POLICIES)
        for step in (step for steps in records for step in steps):
            if step.dense:
                counted["dense"] += step.num_blocks
            else:
                kept, forced = len(step.blocks), min(step.num_blocks, 2)
                share = Fraction(POLICIES[name]["exploration"])
                explored = min(max(1, math.floor(share * kept)), kept - forced)
                counted["forced"] += forced
                counted["explore"] += explored
                counted["exploit"] += kept - forced - explored
                counted["skipped"] += step.num_blocks - len(step.blocks)
        assert sum(len(step.blocks) < step.num_blocks for step in records[0]) > 20
    assert seen == set(names)

    deadline = time.monotonic() + 30
    while True:
        exported = {
            outcome: sum(
                value
                for sample, value in spin_server.metrics().items()
                if sample.startswith("spin_kv_blocks_total") and f'outcome="{outcome}"' in sample
            )
            for outcome in ("exploit", "explore", "forced", "skipped", "dense")
        }
        if exported == dict(counted):
            break
        assert time.monotonic() < deadline, (exported, counted)
        time.sleep(1)
    layers = {k.split('layer="')[1].split('"')[0] for k in spin_server.metrics() if "layer=" in k}
    assert layers == {"1", "3"}


def test_several_prompts_and_choices_of_one_request_share_its_policy(
    spin_server: LiveServer,
) -> None:
    body = {"prompt": ["Hello", "World"], "n": 2, "max_tokens": 2, "temperature": 0.5}
    answer = spin_server.post("/v1/completions", {**body, "vllm_xargs": {"spin_policy": "harsh"}})
    assert len(answer["choices"]) == 4
    assert len(spin_server.post("/v1/completions", body)["choices"]) == 4


def test_doctor_examines_the_running_server(
    spin_server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--url", spin_server.url]) == 0
    out = capsys.readouterr().out
    for process in ("front end", "engine core 0", "worker 0"):
        assert f"ok      server: {process}" in out
    assert "plugins spin, spin_cpu active" in out
    assert "ok      server: realized sparsity: " in out


def test_policy_of_a_client_is_checked(spin_server: LiveServer) -> None:
    for arguments in ({"spin_policy": "greedy"}, {"spin_sparsity": 1}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            spin_server.complete("Hello", max_tokens=1, vllm_xargs=arguments)
        assert caught.value.code == 400
        caught.value.close()
    assert spin_server.healthy()
