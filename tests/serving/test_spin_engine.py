"""SPIN in the running engine: its choices are replay's, and its metrics count them."""

import collections
import concurrent.futures
import math
import time
import urllib.error
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import live_server
import numpy as np
import pytest
from live_server import LiveServer
from recorded import replayed
from test_serving import text

from spin_server.algorithm.options import SpinOptions
from spin_server.cli.main import main
from spin_server.policy.policy import ExplorationPolicy, Policy
from spin_server.policy.ratio import Ratio
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

SEED = 11
POLICIES: dict[str, tuple[str, str, ExplorationPolicy, str]] = {
    "gentle": ("0.3", "0.05", "random", "0.5"),
    "aged": ("0.4", "0.2", "block_age", "0.9"),
    "stale": ("0.5", "0.2", "staleness", "0.5"),
    "harsh": ("0.65", "0.1", "random", "0.25"),
    "probing": ("0.5", "0.05", "random", "0.5"),
}
PROBE_PERIOD = {"probing": 8}


def policy(name: str) -> Policy:
    sparsity, exploration, kind, decay = POLICIES[name]
    return Policy(
        sparsity=Ratio.parse("sparsity", sparsity),
        exploration=Ratio.parse("exploration", exploration),
        exploration_policy=kind,
        ema_decay=Ratio.parse("ema_decay", decay),
        probe_period=PROBE_PERIOD.get(name, 0),
    )


def policy_file() -> str:
    lines = ["policies:"]
    for name, (sparsity, exploration, kind, decay) in POLICIES.items():
        lines += [
            f"  {name}:",
            f"    sparsity: {sparsity}",
            f"    exploration: {exploration}",
            f"    exploration_policy: {kind}",
            f"    ema_decay: {decay}",
            f"    probe_period: {PROBE_PERIOD.get(name, 0)}",
        ]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spin")


@pytest.fixture(scope="module")
def spin_server(folder: Path) -> Iterator[LiveServer]:
    model = folder / "model"
    overrides = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "index_n_heads": 8}
    write_checkpoint(model, tiny_config(overrides), seed=0)
    (folder / "policies.yaml").write_text(policy_file())
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
    policies = [Policy(), *(policy(name) for name in names)]
    for path in paths:
        with np.load(path) as recorded:
            name = names[int(recorded["policy"]) - 1]
            seen.add(name)
            assert recorded["layers"].tolist() == [1, 3]
            assert recorded["scores"].shape[1] >= 39
        records = replayed(path, SpinOptions(seed=SEED), policies)
        for step in (step for steps in records for step in steps):
            if step.dense:
                counted["dense"] += step.num_blocks
            else:
                kept, forced = len(step.blocks), min(step.num_blocks, 2)
                share = Fraction(POLICIES[name][1])
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
