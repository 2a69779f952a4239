"""SPIN on a GPU: checks against dense scoring, and what it saves of a decode step.

Run on a machine with a GPU, in an environment with spin-server[cuda]:
  python benchmarks/serving_gpu.py check [--graphs] [--out A.json]   correctness on short contexts
  python benchmarks/serving_gpu.py compare A.json B.json             two checks' tokens and plans
  python benchmarks/serving_gpu.py time [--batch 96] [--tokens 519168] [--layers 14]
One rank of a TP8/EP8 deployment of DeepSeek-V4-Flash, some of its layers, dummy weights. The
prefill is skipped (vLLM's DecodeBenchConnector); the indexer's pages hold random keys and scales.
Without VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 and VLLM_DEEP_GEMM_WARMUP=skip, vLLM compiles for
minutes first; the figures were taken with both.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from machine import driven_engine

HERE = Path(__file__).parent
SPARSITIES = {"0.3": "0.05", "0.4": "0.2", "0.5": "0.2", "0.65": "0.05"}
CHECKED = {
    "gentle": {"sparsity": 0.3, "exploration": 0.05},
    "harsh": {"sparsity": 0.65, "exploration": 0.2, "exploration_policy": "block_age"},
    "stale": {"sparsity": 0.5, "exploration": 0.3, "exploration_policy": "staleness"},
    "probing": {"sparsity": 0.5, "exploration": 0.05, "probe_period": 4},
    "all": {"sparsity": 0, "exploration": 0.2},
}


def config(num_layers: int) -> dict[str, Any]:
    """config.json of the first layers of one TP8/EP8 rank of DeepSeek-V4-Flash."""
    from spin_server.tiny_model.config import tiny_config

    ratios = [0, 0] + [4 if i % 2 == 0 else 128 for i in range(num_layers - 2)] + [0]
    base = tiny_config({"num_hidden_layers": num_layers, "compress_ratios": ratios})
    return {
        **base,
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_attention_heads": 8,
        "q_lora_rank": 1024,
        "o_groups": 1,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 32,
        "num_hash_layers": 3,
        "expert_dtype": "fp8",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }


def make_engine(args: argparse.Namespace, folder: Path, settings: Any, tokens: int) -> Any:
    (folder / "config.json").write_text(json.dumps(config(args.layers)))
    graphs = (
        {
            "compilation_config": {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [args.batch],
                "max_cudagraph_capture_size": args.batch,
            }
        }
        if args.graphs
        else {"enforce_eager": True}
    )
    return driven_engine(
        ["spin"],
        settings,
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=tokens,
        max_num_seqs=args.batch,
        max_num_batched_tokens=max(2048, args.batch),
        enable_prefix_caching=False,
        gpu_memory_utilization=args.memory,
        kv_cache_memory_bytes=2**32 if args.what == "check" else None,
        async_scheduling=False,
        kernel_config={"enable_jit_warmup": False},
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
        detokenize=False,
        extra_args={"spin_policy": policy},
    )
    prompt = ((np.arange(tokens) * 7919 + 13) % 120_000 + 2).tolist()
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def check(args: argparse.Namespace) -> None:
    """Five policies in one batch that is joined and left, beside dense scores."""
    from spin_server.engine.spin.settings import SpinSettings

    policies = {} if args.off else CHECKED
    settings = SpinSettings.model_validate({"enabled": not args.off, "policies": policies})
    if args.keep_all:
        settings = SpinSettings.model_validate({"default": {"sparsity": 0}})
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder), settings, 32768)
        if not args.off:
            print("install", engine.collective_rpc("bench_install"))
        print("pages", engine.collective_rpc("bench_fill", args=(1,)))
        if args.beside:
            engine.collective_rpc("bench_check")
        lengths = [2040, 3000, 9001, 16002, 30003]
        tokens, hashes = {}, []
        for index, length in enumerate(lengths):
            policy = 0 if args.off or args.keep_all else index + 1
            add(engine, f"r{index}", length, policy, args.steps - 3 * index)
        step = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if step == 0:
                engine.collective_rpc("bench_fill", args=(1,))  # the connector filled pages
            if not args.off:
                hashes.append(engine.collective_rpc("bench_hash")[0])
            step += 1
            if step == 9:
                add(engine, "late", 5000, 0 if args.off or args.keep_all else 2, 12)
        found = {} if args.off else engine.collective_rpc("bench_found")[0]
    print(json.dumps(found))
    if args.out:
        Path(args.out).write_text(json.dumps({"tokens": tokens, "hashes": hashes, "found": found}))


def compare(one: Path, other: Path) -> int:
    """Compare two checks; 0 if every token, and every plan that both made, is the same."""
    first, second = (json.loads(path.read_text()) for path in (one, other))
    tokens = first["tokens"] == second["tokens"]
    plans = not (first["hashes"] and second["hashes"]) or first["hashes"] == second["hashes"]
    print(f"tokens {'equal' if tokens else 'differ'}, plans {'equal' if plans else 'differ'}")
    return 0 if tokens and plans else 1


def measure(args: argparse.Namespace) -> None:
    from spin_server.engine.spin.settings import SpinSettings

    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder), SpinSettings(), args.tokens + 4096)
        print("install", engine.collective_rpc("bench_install"))
        for index in range(args.batch):
            add(engine, f"r{index}", args.tokens - index % 4, 0, 4000)
        started = time.perf_counter()
        for _ in range(4):
            engine.step()
        print(f"requests in: {time.perf_counter() - started:.1f} s")
        engine.collective_rpc("bench_fill", args=(1,))
        print("captured", engine.collective_rpc("bench_capture", args=(["off", "bound"],)))
        runs = [("all-keep", ("off", "0", "0"))]
        for sparsity, exploration in SPARSITIES.items():
            runs.append((f"spin {sparsity}", ("spin", sparsity, exploration)))
            runs.append((f"bound {sparsity}", ("bound", sparsity, exploration)))
        times: dict[str, list[float]] = {name: [] for name, _ in runs}
        realized: dict[str, float] = {}
        for name, setting in (runs[:2] + runs[3:5]) if args.profile else ():
            engine.collective_rpc("bench_switch", args=(*setting, args.tokens))
            engine.step()
            engine.collective_rpc("bench_profile", args=(True,))
            for _ in range(4):
                engine.step()
            print(name, "kernels of 4 steps")
            print(engine.collective_rpc("bench_profile", args=(False,))[0])
        engine.collective_rpc("bench_events")
        device: dict[str, list[float]] = {name: [] for name, _ in runs}
        context, order, begun = args.tokens + 24, np.random.default_rng(0), time.perf_counter()
        rounds = 0
        while rounds < args.rounds and time.perf_counter() - begun < args.seconds:
            for index in order.permutation(len(runs)):
                name, setting = runs[index]
                switch = (*setting, context)
                before = engine.collective_rpc("bench_switch", args=switch)[0]
                for _ in range(2):
                    engine.step()
                engine.collective_rpc("bench_events")
                for _ in range(args.steps):
                    started = time.perf_counter()
                    engine.step()
                    times[name].append(time.perf_counter() - started)
                device[name] += [t / 1000 for t in engine.collective_rpc("bench_events")[0]]
                context += 2 + args.steps
                after = engine.collective_rpc("bench_switch", args=switch)[0]
                if name.startswith("spin"):
                    realized[name] = _realized(before, after)
            rounds += 1
        report(args, times, realized, rounds, "wall")
        print("\nThe device's part of the step alone, by events around the graph's replay")
        report(args, device, realized, rounds, "device")


def _realized(before: dict[str, Any], after: dict[str, Any]) -> float:
    counts: dict[str, int] = {}
    for layer, outcomes in after["layers"].items():
        for outcome, count in outcomes.items():
            counts[outcome] = counts.get(outcome, 0) + count - before["layers"][layer][outcome]
    sparse = sum(counts.values()) - counts["dense"]
    return counts["skipped"] / max(sparse, 1)


def report(
    args: argparse.Namespace,
    times: dict[str, list[float]],
    realized: dict[str, float],
    rounds: int,
    clock: str,
) -> None:
    import torch

    grouped = {n: np.array(t).reshape(rounds, -1) * 1000 for n, t in times.items()}
    picks = np.random.default_rng(0).integers(0, rounds, (4000, rounds))
    picks[0] = np.arange(rounds)

    def medians(name: str) -> np.ndarray:
        return np.array([np.median(grouped[name][p]) for p in picks])

    keep = medians("all-keep")
    print(f"\n{args.batch} x {args.tokens:,} tokens, {args.layers} layers, {rounds} rounds")
    print("| config | step ms (p20, p80) | saved | share of the bound's gain (95%) | realized |")
    base = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "vllm": version("vllm"),
        "torch": torch.__version__,
        "layers": args.layers,
        "batch": args.batch,
        "context": args.tokens,
        "graphs": "full" if args.graphs else "none",
        "mtp": 0,
        "rounds": rounds,
        "clock": clock,
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
            "realized_sparsity": realized.get(name),
            "step_ms": [p50, p20, p80],
            "tokens_per_s": args.batch / p50 * 1000,
        }
        shown = ""
        if kind == "spin":
            shares = (keep - medians(name)) / (keep - medians(f"bound {sparsity}"))
            low, high = np.percentile(shares, [2.5, 97.5])
            row["share_captured"] = [float(shares[0]), float(low), float(high)]
            shown = f"{shares[0]:.0%} ({low:.0%} to {high:.0%})"
        rows.append(row)
        print(
            f"| {name} | {p50:.2f} ({p20:.2f}, {p80:.2f}) | {1 - p50 / keep[0]:.1%} | {shown} "
            f"| {realized.get(name, 0):.3f} |"
        )
    out = Path(args.out) if args.out else HERE / "results" / "serving_gpu.jsonl"
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "compare", "time"))
    parser.add_argument("files", nargs="*", type=Path, help="of compare: two results of check")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int, default=519_168)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240, help="of timing, at most")
    parser.add_argument("--steps", type=int, help="timed of each run; of a check, in all")
    parser.add_argument("--memory", type=float, default=0.92)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--beside", action="store_true", help="check every eager step")
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--keep-all", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some steps")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.what == "compare":
        sys.exit(compare(*args.files))
    if args.files:
        parser.error("only compare takes files")
    defaults = (8, 8, 40) if args.what == "check" else (14, 96, 5)
    for name, value in zip(("layers", "batch", "steps"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.what == "time":
        args.graphs = True
    (check if args.what == "check" else measure)(args)


if __name__ == "__main__":
    main()
