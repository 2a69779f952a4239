"""Whether the ranks of a tensor-parallel engine choose and remember the same, step by step.

Nothing that a rank chooses is told to the others: each computes it from scores that have to be
equal to the bit. Here the real engine runs a fixed schedule of requests that come, explore and go,
and after every step each rank's hashes are compared.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spin_server.engine.model_support import indexer_geometry, read_local_config, read_whole
from spin_server.engine.spin.settings import POLICY_ARGUMENT, PolicySettings, SpinSettings
from spin_server.engine.stepped import WORKER_EXTENSION, stepped_engine
from spin_server.errors import InputError, StartupError
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config

_RUN = "from spin_server.engine.ranks import main; main()"
_MAX_TOKENS = 8192  # of a context
_SPARSE: dict[str, Any] = {"sparsity": "0.65", "exploration": "0.3"}
_SETTINGS = SpinSettings(
    default=PolicySettings(**_SPARSE),
    policies={
        "oldest": PolicySettings(**_SPARSE, exploration_policy="block_age"),
        "probing": PolicySettings(**_SPARSE, exploration_policy="staleness", probe_period=16),
    },
    min_context=0,
)
# A request comes every so many steps; by turns, tokens of its prompt and to generate. Prompts
# share prefixes, so that later ones meet the prefix cache; the longest is prefilled in chunks
# beside decoding ones; one grows past the length where the indexer starts to be called.
_EVERY = 80
_TURNS = ((2100, 180), (12, 40), (2040, 160), (5000, 120), (2497, 200))
_POLICIES = (0, 0, 1, 0, 2)
# What a rank is asked for, in the order in which a difference spreads.
_PARTS = {
    "table": "its table of policies holds other values",
    "choices": "it chose other blocks from equal histories",
    "histories": "it got other scores for the same blocks",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a rank first differs from rank 0.

    Args:
        step: of the engine, from 1.
        rank: the lowest that differs.
        part: `table`, `choices` or `histories`.
        layer: number of the first layer that differs; None for the table.
    """

    step: int
    rank: int
    part: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of comparing the ranks.

    Args:
        steps: that were compared.
        requests: that came.
        changed: steps after which the histories were others than before.
        outcomes: blocks by outcome, of rank 0.
        difference: the first, at which the comparison ended, if there is one.
    """

    steps: int
    requests: int
    changed: int
    outcomes: dict[str, int]
    difference: Difference | None


def find_difference(step: int, reports: Sequence[dict[str, Any]]) -> Difference | None:
    """Compare what the ranks answered after a step.

    Args:
        step: of the engine, from 1.
        reports: see `SpinWorkerExtension.spin_digest`.

    Raises:
        StartupError: a rank does not know.
    """
    first, *others = sorted(reports, key=lambda report: int(report["rank"]))
    for report in (first, *others):
        if "error" in report:
            raise StartupError(f"rank {report['rank']}: {report['error']}")
    for part in _PARTS:
        for other in others:
            if other[part] == first[part]:
                continue
            layer = None
            if part != "table":
                pairs = zip(first["layers"], first[part], other[part], strict=True)
                layer = next(number for number, one, another in pairs if one != another)
            return Difference(step, other["rank"], part, layer)
    return None


def compare(engine: Any, num_steps: int) -> Comparison:
    """Step an engine through the schedule, and compare its ranks after every step.

    Args:
        engine: see `stepped_engine`; its settings have the policies of the schedule.
        num_steps: at most; the first difference ends it.

    Raises:
        StartupError: a rank does not know what it chose.
    """
    from vllm import SamplingParams

    num_requests = num_changed = 0
    difference, before = None, None
    for step in range(num_steps):
        for name, prompt, tokens, policy in _arrivals(step):
            params = SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={POLICY_ARGUMENT: policy},
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            num_requests += 1
        engine.step()
        reports = engine.collective_rpc("spin_digest")
        difference = find_difference(step + 1, reports)
        if difference is not None:
            break
        num_changed += reports[0]["histories"] != before
        before = reports[0]["histories"]
    layers = engine.collective_rpc("spin_snapshot")[0]["layers"].values()
    outcomes = {name: sum(one[name] for one in layers) for name in next(iter(layers))}
    return Comparison(step + 1, num_requests, num_changed, outcomes, difference)


def _arrivals(step: int) -> Iterator[tuple[str, list[int], int, int]]:
    """Name, prompt, tokens to generate, and policy of the requests that come before a step."""
    if step % _EVERY:
        return
    number = step // _EVERY
    # Two at once to begin with, so that one is prefilled while the other decodes.
    for index in (0, 1) if number == 0 else (number + 1,):
        length, tokens = _TURNS[index % len(_TURNS)]
        tail = [2 + (index * 31 + i) % 250 for i in range(index % 7)]
        shared = [2 + (i * 7919 + i // 97) % 250 for i in range(length)]
        yield f"request {index}", shared + tail, tokens, _POLICIES[index % len(_POLICIES)]


def check_ranks(
    model: str | None,
    num_ranks: int,
    num_steps: int,
    *,
    on_cpu: bool,
    worker_extension: str = WORKER_EXTENSION,
) -> str:
    """Run the schedule in a process of its own, and compare the ranks after every step.

    Args:
        model: a folder, or a name for vLLM to look up; None for a tiny one, on a CPU.
        num_ranks: of tensor parallelism, 2 or more.
        num_steps: of the engine.
        on_cpu: whether the engine is a CPU's.
        worker_extension: see `stepped_engine`.

    Returns:
        What was found equal, in words.

    Raises:
        InputError: no model where there has to be one, or one with too short a context.
        UnsupportedError: a model that SPIN does not serve.
        StartupError: the engine does not start, the ranks differ, or nothing was compared.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model is None:
            if not on_cpu:
                raise InputError("--ranks", "MODEL beside it on a GPU", "none")
            model = str(folder / "tiny")
            write_checkpoint(Path(model), _tiny(num_ranks), seed=0)
        max_tokens = _context(model)
        given = {
            "model": model,
            "ranks": num_ranks,
            "steps": num_steps,
            "max_tokens": max_tokens,
            "worker_extension": worker_extension,
            "out": str(folder / "out"),
        }
        log = folder / "log"
        with log.open("wb") as file:
            ended = subprocess.run(
                [sys.executable, "-c", _RUN, json.dumps(given)],
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if ended.returncode or not (folder / "out").exists():
            raise StartupError(_failure(log.read_text(errors="replace")))
        found = json.loads((folder / "out").read_text())
    difference = found.pop("difference")
    comparison = Comparison(**found, difference=difference and Difference(**difference))
    return _told(comparison, num_ranks, num_steps)


def _tiny(num_ranks: int) -> dict[str, Any]:
    """config.json of a tiny model with two CSA layers, which so many ranks can share."""
    ranked = {"num_attention_heads": num_ranks, "o_groups": num_ranks}
    return tiny_config({"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], **ranked})


def _context(model: str) -> int:
    """Tokens of the longest context of the check."""
    config = read_local_config(model)
    if config is None:  # a name, which vLLM looks up
        return _MAX_TOKENS
    indexer_geometry(config)
    tokens = read_whole(config, "max_position_embeddings")
    if tokens < _MAX_TOKENS:
        raise InputError(
            f"MODEL {model}", f"contexts of {_MAX_TOKENS:,} tokens, for --ranks", f"{tokens:,}"
        )
    return _MAX_TOKENS


def _failure(log: str) -> str:
    """Say why the engine ended: the first error that it logged, or else its last line.

    Keeps the whole log, and says where.
    """
    with tempfile.NamedTemporaryFile(
        "w", prefix="spin-ranks-", suffix=".log", delete=False
    ) as kept:
        kept.write(log)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return f"the engine ended: {[*errors, *lines[-1:], 'nothing said'][0]}; its log: {kept.name}"


def _told(found: Comparison, num_ranks: int, num_steps: int) -> str:
    """Put a comparison into words.

    Raises:
        StartupError: the ranks differ, or nothing was compared.
    """
    difference = found.difference
    if difference is not None:
        layer = "" if difference.layer is None else f", in layer {difference.layer}"
        raise StartupError(
            f"expected {num_ranks} ranks to choose alike in {num_steps:,} steps, but rank "
            f"{difference.rank} differs from rank 0 from step {difference.step:,} on{layer}: "
            f"{_PARTS[difference.part]}; serve on one rank or with --spin-off, and report this line"
        )
    if not (found.outcomes["explore"] and found.outcomes["skipped"] and found.changed):
        raise StartupError(
            f"expected blocks that are explored and skipped in {num_steps:,} steps, got none: "
            "nothing was compared; give more --steps"
        )
    kept = sum(found.outcomes[name] for name in ("exploit", "explore", "forced"))
    return (
        f"{num_ranks} ranks chose the same blocks and hold the same histories in {found.steps:,} "
        f"of {num_steps:,} steps ({found.requests} requests; {kept:,} blocks kept, "
        f"{found.outcomes['explore']:,} of them to explore, {found.outcomes['skipped']:,} skipped)"
    )


def main() -> None:
    """Run the schedule; sys.argv[1] is what `check_ranks` wrote."""
    given = json.loads(sys.argv[1])
    engine = stepped_engine(
        given["model"],
        _SETTINGS,
        ranks=given["ranks"],
        worker_extension=given["worker_extension"],
        skip_tokenizer_init=True,
        max_model_len=given["max_tokens"],
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        async_scheduling=False,  # a step is over when its hashes are read
        disable_log_stats=True,
    )
    found = dataclasses.asdict(compare(engine, given["steps"]))
    Path(given["out"]).write_text(json.dumps(found))
