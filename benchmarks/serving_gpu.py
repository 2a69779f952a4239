"""SPIN on a GPU: checks against dense scoring, and what it saves of a decode step.

Run on a machine with a GPU, in an environment with spin-server[cuda]:
  python benchmarks/serving_gpu.py check [--graphs full] [--out A.json]  short contexts
  python benchmarks/serving_gpu.py check --model v32 | glm5 [--kv-cache fp8]  one slot per token
  python benchmarks/serving_gpu.py compare A.json B.json   two checks' tokens, top-K and plans
  python benchmarks/serving_gpu.py time [--batch 96] [--tokens 519168] [--layers 14]
  python benchmarks/serving_gpu.py grid                    1, 16, 48 requests, 32K to 1M tokens
One rank of a TP8/EP8 deployment of DeepSeek-V4-Flash (or of --model), some of its layers, dummy
weights. The prefill is skipped (vLLM's DecodeBenchConnector); the indexer's pages hold random keys
and scales, and its queries are random too: dummy weights make zeros of them.
Without VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 and VLLM_DEEP_GEMM_WARMUP=skip, vLLM compiles for
minutes first; the figures were taken with both.
"""

import argparse
import datetime
import gzip
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from gpu_models import MODELS
from machine import commit, driven_engine

HERE = Path(__file__).parent
ACCEPTED = [0.8, 0.6, 0.45, 0.3, 0.2]  # share of steps that accept so many drafts, or more
GRAPHS = {"full": "FULL_DECODE_ONLY", "piecewise": "PIECEWISE"}
GRID_BATCHES, GRID_TOKENS = (48, 16, 1), (1_044_480, 131_072, 65_536, 32_768)
SPARSITIES = {"0.3": "0.05", "0.4": "0.2", "0.5": "0.2", "0.65": "0.05"}
CHECKED = {
    "gentle": {"sparsity": 0.3, "exploration": 0.05},
    "harsh": {"sparsity": 0.65, "exploration": 0.2, "exploration_policy": "block_age"},
    "stale": {"sparsity": 0.5, "exploration": 0.3, "exploration_policy": "staleness"},
    "probing": {"sparsity": 0.5, "exploration": 0.05, "probe_period": 4},
    "all": {"sparsity": 0, "exploration": 0.2},
}


def make_engine(args: argparse.Namespace, folder: Path, settings: Any, tokens: int) -> Any:
    (folder / "config.json").write_text(json.dumps(MODELS[args.model](args.layers, args.tp)))
    sizes = {"grid": sorted(GRID_BATCHES), "time": [args.batch]}.get(
        args.what, [args.batch] if args.padded else list(range(1, args.batch + 1))
    )
    sizes = [(1 + args.mtp) * size for size in sizes]
    drafts = {
        "method": "mtp",
        "num_speculative_tokens": args.mtp,
        # Random weights accept almost nothing.
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": ACCEPTED[: args.mtp],
    }
    graphs = (
        {"enforce_eager": True}
        if args.graphs == "none"
        else {
            "compilation_config": {
                "cudagraph_mode": GRAPHS[args.graphs],
                "cudagraph_capture_sizes": sizes,
                "max_cudagraph_capture_size": max(sizes),
                # FlashInfer would compile its kernels for minutes first.
                "pass_config": {"fuse_allreduce_rms": False},
            }
        }
    )
    kernels: dict[str, Any] = {"enable_jit_warmup": False}
    if args.tp > 1:
        kernels["moe_backend"] = "triton"  # what one GPU takes by itself
    return driven_engine(
        ["spin"],
        settings,
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=tokens,
        kv_cache_dtype=args.kv_cache,
        tensor_parallel_size=args.tp,
        enable_expert_parallel=args.tp > 1,
        max_num_seqs=args.batch,
        max_num_batched_tokens=max(2048, args.batch * (1 + args.mtp)),
        speculative_config=drafts if args.mtp else None,
        enable_prefix_caching=False,
        gpu_memory_utilization=args.memory,
        kv_cache_memory_bytes=2**30 if args.what == "check" else None,
        async_scheduling=False,
        kernel_config=kernels,
        kv_transfer_config={
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"fill_mean": 0.015, "fill_std": 0.0},
        },
        worker_extension_cls="gpu_worker.GpuBenchWorker",
        **graphs,
    )


def add(engine: Any, name: str, tokens: int, policy: int, max_tokens: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0,
        seed=policy,  # synthetic verdicts draw by it
        detokenize=False,
        extra_args={"spin_policy": policy},
    )
    prompt = ((np.arange(tokens) * 7919 + 13) % 120_000 + 2).tolist()
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def check(args: argparse.Namespace) -> None:
    """Five policies in one batch that is joined and left, beside dense scores."""
    from spin_server.engine.spin.settings import SpinSettings

    given: dict[str, Any] = {"enabled": not args.off, "min_context": 0, "history": args.history}
    if args.keep_all:
        given["default"] = {"sparsity": 0}
    elif not args.off:
        given["policies"] = CHECKED
    settings = SpinSettings.model_validate(given)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder), settings, 32768)
        print("install", engine.collective_rpc("bench_install", args=(True,)))
        print("pages", engine.collective_rpc("bench_fill", args=(1,)))
        engine.collective_rpc("bench_keep_pages")
        if args.graphs == "full":  # in pieces, the indexer is in none of the graphs
            engine.collective_rpc("bench_capture", args=(["off" if args.off else "spin"],))
        if args.beside:
            engine.collective_rpc("bench_check")
        lengths = [2040, 3000, 9001, 16002, 30003]
        tokens, hashes, top = {}, [], []
        split: dict[str, list[int]] = {"top-K": [], "plans": [], "histories": []}
        for index, length in enumerate(lengths):
            policy = 0 if args.off or args.keep_all else index + 1
            add(engine, f"r{index}", length, policy, args.steps - 3 * index)
        step = 0
        while running := engine.get_num_unfinished_requests():
            engine.collective_rpc("bench_queries", args=(step,))
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            ranks = {"top-K": engine.collective_rpc("bench_topk", args=(running * (1 + args.mtp),))}
            top.append(ranks["top-K"][0])
            if not args.off:
                ranks["plans"] = engine.collective_rpc("bench_hash")
                hashes.append(ranks["plans"][0])
                if args.tp > 1:
                    digests = engine.collective_rpc("spin_digest")
                    ranks["histories"] = [str(digest.get("histories")) for digest in digests]
            for what, digests in ranks.items():
                if len(set(digests)) > 1:
                    split[what].append(step)
            step += 1
            if step == 9:
                add(engine, "late", 5000, 0 if args.off or args.keep_all else 2, 12)
        found = {} if args.off else engine.collective_rpc("bench_found")[0]
    print(json.dumps(found))
    if args.tp > 1:
        for what, steps in split.items():
            print(f"{what}: {args.tp} ranks differ in {len(steps)} of {step} steps {steps or ''}")
    if args.out:
        results = {"tokens": tokens, "plans": hashes, "top-K": top, "found": found}
        Path(args.out).write_text(json.dumps(results))


def compare(one: Path, other: Path) -> int:
    """Compare two checks; 0 if all tokens, top-K sets, and plans that both made, are the same."""
    first, second = (json.loads(path.read_text()) for path in (one, other))
    same = {
        name: first[name] == second[name]
        for name in ("tokens", "top-K", "plans")
        if first[name] and second[name]
    }
    found = ", ".join(
        f"{name} equal" if equal else f"{name} differ{_where(first[name], second[name])}"
        for name, equal in same.items()
    )
    print(f"{one.stem} and {other.stem}, {len(first['top-K'])} steps: {found}")
    return 0 if all(same.values()) else 1


def _where(one: Any, other: Any) -> str:
    """Say at which steps two lists of digests differ."""
    if isinstance(one, dict):
        return f" ({', '.join(name for name in one if one[name] != other.get(name))})"
    steps = [step for step, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return f" ({len(steps)} of {len(one)} steps, from step {steps[0] if steps else 'the end'})"


Runs = list[tuple[str, tuple[str, str, str]]]


class Timed:
    """Configurations that alternate in one run, each for a few steps.

    Args:
        runs: name, and mode, sparsity and exploration.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.wall: dict[str, list[float]] = {name: [] for name, _ in runs}
        self.device: dict[str, list[float]] = {name: [] for name, _ in runs}
        self.realized: dict[str, float] = {}
        self.distinct: dict[str, float] = {}
        self.differing: dict[str, float | None] = {}  # share of a history's values
        self.rounds = self.steps = 0

    def run(self, engine: Any, args: argparse.Namespace, context: int, seconds: float) -> None:
        """Step a running batch, whose contexts are about `context` tokens."""
        order, begun = np.random.default_rng(0), time.perf_counter()
        while self.rounds < args.rounds and time.perf_counter() - begun < seconds:
            for index in order.permutation(len(self.runs)):
                name, setting = self.runs[index]
                switch = (*setting, context)
                before = engine.collective_rpc("bench_switch", args=switch)[0]
                for _ in range(2):
                    self.step(engine)
                engine.collective_rpc("bench_events")
                for _ in range(args.steps):
                    self.wall[name].append(self.step(engine))
                self.device[name] += [t / 1000 for t in engine.collective_rpc("bench_events")[0]]
                context += 2 + args.steps
                after = engine.collective_rpc("bench_switch", args=switch)[0]
                if setting[0] not in ("off", "bound"):
                    self.realized[name] = _realized(before, after)
                    listed = (f"{name} {args.batch} {args.tokens}",)
                    found = engine.collective_rpc("bench_listed", args=listed)[0]
                    self.distinct[name], self.differing[name] = found
                    if found[1] is not None and found[1] < 0.9:
                        raise SystemExit(f"expected scores that differ, got {found[1]:.0%} of them")
            self.rounds += 1

    def step(self, engine: Any) -> float:
        """Run a step on other queries than the last one; seconds."""
        engine.collective_rpc("bench_queries", args=(self.steps,))
        self.steps += 1
        started = time.perf_counter()
        engine.step()
        return time.perf_counter() - started


def measure(args: argparse.Namespace) -> None:
    """All-keep, the bound and SPIN at the paper's point, and SPIN's work in and off the way."""
    from spin_server.engine.spin.settings import SpinSettings

    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(
            args, Path(folder), SpinSettings(history=args.history), args.tokens + 4096
        )
        print("install", engine.collective_rpc("bench_install"))
        for index in range(args.batch):
            add(engine, f"r{index}", args.tokens - index % 4, 0, 4000)
        started = time.perf_counter()
        for _ in range(4):
            engine.step()
        print(f"requests in: {time.perf_counter() - started:.1f} s")
        engine.collective_rpc("bench_fill", args=(1,))
        modes = ["off", "bound", "spin", "in-order", *args.variants]
        print("captured", engine.collective_rpc("bench_capture", args=(modes,)))
        runs: Runs = [("all-keep", ("off", "0", "0"))]
        for sparsity in args.sparsities:
            runs.append((f"spin {sparsity}", ("spin", sparsity, SPARSITIES[sparsity])))
            runs.append((f"bound {sparsity}", ("bound", sparsity, SPARSITIES[sparsity])))
        runs += [(f"{mode} 0.4", (mode, "0.4", SPARSITIES["0.4"])) for mode in modes[3:]]
        for name, setting in runs if args.profile else ():
            engine.collective_rpc("bench_switch", args=(*setting, args.tokens))
            engine.step()
            engine.collective_rpc("bench_profile", args=(True,))
            for _ in range(2):
                engine.step()
            kernels = engine.collective_rpc("bench_profile", args=(False,))[0]
            with gzip.open(args.profile, "at") as file:
                file.write(json.dumps({"config": name, "steps": 2, "kernels": kernels}) + "\n")
        engine.collective_rpc("bench_events")
        timed = Timed(runs)
        timed.run(engine, args, args.tokens + 24, args.seconds)
        report(args, timed, "wall")
        print("\nThe device's part of the step alone, with the host ahead of it")
        report(args, timed, "device")


def grid(args: argparse.Namespace) -> None:
    """Small batches, short and very long contexts: where SPIN pays, and where it must not cost."""
    from spin_server.engine.spin.settings import SpinSettings

    with tempfile.TemporaryDirectory() as folder:
        args.batch = max(GRID_BATCHES)
        engine = make_engine(
            args, Path(folder), SpinSettings(min_context=0, history=args.history), 2**20
        )
        print("install", engine.collective_rpc("bench_install"))
        engine.collective_rpc("bench_fill", args=(1,))
        engine.collective_rpc("bench_keep_pages")
        modes = ["off", "bound", "spin", "spin+short"]
        print("captured", engine.collective_rpc("bench_capture", args=(modes,)))
        engine.collective_rpc("bench_events")
        runs: Runs = [("all-keep", ("off", "0", "0"))]
        for sparsity in ("0.3", "0.4"):
            runs.append((f"spin {sparsity}", ("spin", sparsity, SPARSITIES[sparsity])))
        runs.append(("bound 0.4", ("bound", "0.4", SPARSITIES["0.4"])))
        for args.tokens in GRID_TOKENS:
            for args.batch in GRID_BATCHES:
                names = [f"r{args.tokens}-{index}" for index in range(args.batch)]
                for name in names:
                    add(engine, name, args.tokens, 0, 3000)
                for _ in range(4):
                    engine.step()
                short = [("spin+short 0.4", ("spin+short", "0.4", SPARSITIES["0.4"]))]
                timed = Timed(runs + short if args.tokens <= 65_536 else runs)
                timed.run(engine, args, args.tokens + 4, args.seconds)
                report(args, timed, "device")
                engine.abort_request(names, internal=False)
                engine.step()


def _realized(before: dict[str, Any], after: dict[str, Any]) -> float:
    counts: dict[str, int] = {}
    for layer, outcomes in after["layers"].items():
        for outcome, count in outcomes.items():
            counts[outcome] = counts.get(outcome, 0) + count - before["layers"][layer][outcome]
    sparse = sum(counts.values()) - counts["dense"]
    return counts["skipped"] / max(sparse, 1)


def report(args: argparse.Namespace, timed: Timed, clock: str) -> None:
    """Print a table, and append its rows to the results."""
    import torch

    rounds = timed.rounds
    times = timed.wall if clock == "wall" else timed.device
    grouped = {n: np.array(t).reshape(rounds, -1) * 1000 for n, t in times.items()}
    picks = np.random.default_rng(0).integers(0, rounds, (4000, rounds))
    picks[0] = np.arange(rounds)

    def medians(name: str) -> np.ndarray:
        return np.array([np.median(grouped[name][p]) for p in picks])

    keep = medians("all-keep")
    print(f"\n{args.batch} x {args.tokens:,} tokens, {args.layers} layers, {rounds} rounds")
    print(
        "| config | step ms (p20, p80) | saved (95%) | share of the bound's gain (95%) | realized |"
    )
    base = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "vllm": version("vllm"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": args.commit,
        "model": args.model,
        "layers": args.layers,
        "batch": args.batch,
        "context": args.tokens,
        "graphs": args.graphs,
        "mtp": args.mtp,
        "history": args.history,
        "rounds": rounds,
        "clock": f"{clock}, host ahead" if clock == "device" else clock,
    }
    rows = []
    for name in times:
        kind, _, sparsity = name.partition(" ")
        p20, p50, p80 = np.percentile(grouped[name], [20, 50, 80])
        row = {
            **base,
            "config": kind,
            "target_sparsity": float(sparsity or 0),
            "exploration": float(SPARSITIES.get(sparsity, "0")),
            "realized_sparsity": timed.realized.get(name),
            "distinct_blocks": timed.distinct.get(name),
            "differing_scores": timed.differing.get(name),
            "step_ms": [p50, p20, p80],
            "tokens_per_s": args.batch * (1 + sum(ACCEPTED[: args.mtp])) / p50 * 1000,
        }
        saved = 1 - medians(name) / keep
        row["saved"] = [float(saved[0]), *map(float, np.percentile(saved, [2.5, 97.5]))]
        shown = ""
        if kind not in ("all-keep", "bound") and f"bound {sparsity}" in times:
            shares = (keep - medians(name)) / (keep - medians(f"bound {sparsity}"))
            low, high = np.percentile(shares, [2.5, 97.5])
            row["share_captured"] = [float(shares[0]), float(low), float(high)]
            shown = f"{shares[0]:.0%} ({low:.0%} to {high:.0%})"
        rows.append(row)
        low, high = row["saved"][1:]
        gain = f"{saved[0]:.1%} ({low:.1%} to {high:.1%})"
        print(
            f"| {name} | {p50:.3f} ({p20:.3f}, {p80:.3f}) | {gain} | {shown} "
            f"| {timed.realized.get(name, 0):.3f} |"
        )
    out = Path(args.out) if args.out else HERE / "results" / "serving_gpu.jsonl"
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "compare", "time", "grid"))
    parser.add_argument("files", nargs="*", type=Path, help="of compare: two results of check")
    parser.add_argument("--model", choices=MODELS, default="v4")
    parser.add_argument("--kv-cache", default="auto", help="dtype of the attention's cache")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int, default=519_168)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240, help="of timing, at most")
    parser.add_argument("--steps", type=int, help="timed of each run; of a check, in all")
    parser.add_argument("--memory", type=float, default=0.92)
    parser.add_argument("--graphs", choices=("none", *GRAPHS), help="of a check (none)")
    parser.add_argument("--commit", default=commit(), help="what is measured")
    parser.add_argument("--beside", action="store_true", help="check every eager step")
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--keep-all", action="store_true")
    parser.add_argument(
        "--profile", help="file for the kernels of two steps of each, JSON lines, gzip"
    )
    parser.add_argument(
        "--variants", nargs="*", default=[], help="more modes to time, such as spin+high"
    )
    parser.add_argument("--sparsities", nargs="*", default=list(SPARSITIES), choices=SPARSITIES)
    parser.add_argument("--history", default="float32", help="how it is stored; or bfloat16")
    parser.add_argument("--mtp", type=int, default=0, help="drafts; synthetic verdicts accept them")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a check")
    parser.add_argument("--padded", action="store_true", help="capture the largest batch alone")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.what == "compare":
        sys.exit(compare(*args.files))
    if args.files:
        parser.error("only compare takes files")
    if args.what == "grid" and args.model != "v4":
        parser.error("grid's contexts are DeepSeek-V4's")
    defaults = (8, 8, 40) if args.what == "check" else (14, 96, 5)
    for name, value in zip(("layers", "batch", "steps"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.graphs is None or args.what != "check":
        args.graphs = "none" if args.what == "check" else "full"
    {"check": check, "time": measure, "grid": grid}[args.what](args)


if __name__ == "__main__":
    main()
