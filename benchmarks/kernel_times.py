"""SPIN's kernels on a GPU: bytes counted, time, share of the copy bandwidth of the same run.

Run on a machine with a GPU, in an environment with spin-server[cuda]:
  python benchmarks/kernel_times.py [--batch 96] [--tokens 519168] [--layers 6] [--sparsity 0.4]
Every kernel is timed by events around CUDA graphs of 24 launches, one of each layer after the
other. The dense indexer call, vLLM's scoring and top-K on random keys, is timed beside, unless
--alone leaves vLLM out.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from machine import commit
from torch import Tensor

from spin_kernels.compact_table.triton import compact_table
from spin_kernels.plan_blocks.triton import plan_blocks
from spin_kernels.window_max.triton import window_max
from spin_server.algorithm.options import SpinOptions
from spin_server.engine.spin.device import DeviceLayers
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.engine.spin.requests import RequestTracker
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

HERE = Path(__file__).parent
HEADS, DIM, PAGE, RATIO = 64, 128, 64, 4
LAUNCHES, REPEATS = 24, 15


def timed(launch: Callable[[int], object]) -> list[float]:
    """Microseconds of one launch: median, 20th and 80th percentile of graphs of launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(LAUNCHES):
            launch(index)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return [float(t) for t in np.percentile(times[3:], [50, 20, 80])]


def copy_bandwidth() -> float:
    """TB/s that a large copy moves, reads and writes together."""
    source, target = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / timed(lambda _: target.copy_(source))[0] / 1e6


class DenseIndexer:
    """vLLM's scoring and top-K of one layer over pages of random keys."""

    def __init__(self, batch: int, num_slots: int) -> None:
        from vllm.model_executor.layers.indexer_topk import get_indexer_topk
        from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata
        from vllm.utils.platform_utils import num_compute_units
        from vllm.v1.worker.workspace import init_workspace_manager

        self.function = fp8_fp4_paged_mqa_logits
        self.batch, self.num_slots = batch, num_slots
        pages = -(-num_slots // PAGE)
        pool = torch.empty(batch * pages, PAGE, 1, DIM + 4, dtype=torch.uint8, device="cuda")
        flat = pool.view(len(pool), -1)
        for start in range(0, len(flat), 8192):
            part = flat[start : start + 8192]
            keys = torch.randn(len(part), PAGE * DIM, device="cuda")
            part[:, : PAGE * DIM] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
            scales = torch.rand(len(part), PAGE, device="cuda") + 0.5
            part[:, PAGE * DIM :] = scales.view(torch.uint8)
        self.pool = pool
        order = torch.randperm(len(pool), device="cuda").int()
        self.block_table = order.view(batch, pages)
        self.q = torch.randn(batch, 1, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
        self.weights = torch.rand(batch, HEADS, device="cuda")
        self.lengths = torch.full((batch, 1), num_slots, dtype=torch.int32, device="cuda")
        num_sms = num_compute_units(0)
        self.schedule = get_paged_mqa_logits_metadata(self.lengths, PAGE, num_sms)
        self.top = torch.empty(batch, 512, dtype=torch.int32, device="cuda")
        init_workspace_manager(torch.device("cuda"))
        self.topk = get_indexer_topk("auto")

    def score(self) -> Tensor:
        """Dense scores: (float32): [batch, slots or a few more]."""
        scores: Tensor = self.function(
            (self.q, None),
            self.pool,
            self.weights,
            self.lengths,
            self.block_table,
            self.schedule,
            max_model_len=self.num_slots,
            clean_logits=False,
        )
        return scores

    def select(self, scores: Tensor) -> None:
        """vLLM's top-K of all rows."""
        self.topk(scores, self.lengths, 1, self.top, 512, self.num_slots * RATIO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=519_168)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sparsity", default="0.4")
    parser.add_argument("--history", default="float32", help="how it is stored; or bfloat16")
    parser.add_argument("--alone", action="store_true", help="SPIN's kernels only, without vLLM")
    parser.add_argument("--commit", default=commit(), help="what is measured")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels.jsonl")
    args = parser.parse_args()
    batch, layers, num_slots = args.batch, args.layers, args.tokens // RATIO
    bandwidth = copy_bandwidth()
    spin = DeviceLayers(
        range(layers),
        SpinOptions(history=args.history),
        PolicyTable(1, Policy(sparsity=Ratio.parse("sparsity", args.sparsity)), "cuda"),
        num_states=batch,
        num_rows=batch,
        max_slots=num_slots + 64,
        compress_ratio=RATIO,
        dense_slots=512,
        device=torch.device("cuda"),
    )
    dense = None if args.alone else DenseIndexer(batch, num_slots)
    scores = torch.randn(batch, num_slots, device="cuda") if dense is None else dense.score()
    pages = torch.randperm(batch * (-(-num_slots // PAGE)), device="cuda").int().view(batch, -1)
    lengths = torch.full((batch,), num_slots, dtype=torch.int32, device="cuda")
    top = torch.empty(batch, 512, dtype=torch.int32, device="cuda").random_(0, num_slots // 2)
    tracker = RequestTracker(batch)
    for row in range(batch):
        tracker.admit(f"r{row}", policy=0, key=row, num_known_tokens=args.tokens - 8)
    for step in range(4):  # histories as a running batch has them
        spin.begin(tracker.step([(f"r{row}", args.tokens - 8 + step, 1) for row in range(batch)]))
        spin.plan(lengths, pages)
        for layer in range(layers):
            spin.learn(layer, torch.randn_like(scores))
    kept = int(spin._plan.counts[0, 0])
    blocks = -(-num_slots // PAGE)
    scored = int(spin._plan.lengths[0, 0])
    sizes = {
        "num_layers": 1,
        "num_rows": batch,
        "dense_slots": spin.dense_slots,
        "block_size": PAGE,
        "compress_ratio": RATIO,
    }

    def window(index: int) -> None:
        window_max(spin.histories, spin._rows, first_layer=index % layers, **sizes)

    def plan(index: int) -> None:
        plan_blocks(
            spin.histories,
            spin._rows,
            spin._columns,
            spin._layers,
            spin._plan,
            first_layer=index % layers,
            top_k=512,
            seed=0,
            **sizes,
        )

    def list_pages(index: int) -> None:
        which = {"first_layer": index % layers, "num_layers": 1, "num_rows": batch}
        compact_table(pages, spin._plan, spin._tables, **which)

    size = spin.histories.vertical.element_size()
    # As when every query has moved to another slot: one step in four.
    spin.histories.diagonal_at.fill_(-1)
    cases: list[tuple[str, int, Callable[[int], object]]] = [
        ("window_max", batch * (size * num_slots + 4 * blocks), window),
        ("plan_blocks", batch * (12 * blocks + 4 * kept + 2 * size * PAGE), plan),
        ("compact_table", batch * 12 * kept, list_pages),
        ("slot_remap", batch * 512 * 12, lambda index: spin.remap(index % layers, top)),
        (
            "history_update",
            batch * ((4 + 4 * size) * scored + 16 * kept),
            lambda index: spin.learn(index % layers, scores),
        ),
        (  # slow on purpose: on a few multiprocessors, with nothing beside it here
            "history_update, beside",
            batch * ((4 + 4 * size) * scored + 16 * kept),
            lambda index: spin.learn(index % layers, scores, beside=True),
        ),
    ]
    if dense is not None:
        cases += [
            ("dense scoring", batch * 136 * num_slots, lambda _: dense.score()),
            ("dense top-K", batch * 4 * num_slots, lambda _: dense.select(scores)),
        ]
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        vllm = None
    base = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "vllm": vllm,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": args.commit,
        "batch": batch,
        "context": args.tokens,
        "layers": layers,
        "target_sparsity": float(args.sparsity),
        "history": args.history,
        "copy_tb_per_s": bandwidth,
    }
    print(f"{batch} x {args.tokens:,} tokens, {layers} layers; a copy moves {bandwidth:.2f} TB/s")
    print("| kernel of one layer | MB | µs (p20, p80) | TB/s | share of the copy's |")
    with args.out.open("a") as file:
        for name, num_bytes, launch in cases:
            p50, p20, p80 = timed(launch)
            speed = num_bytes / p50 / 1e6
            share = speed / bandwidth
            print(
                f"| {name} | {num_bytes / 1e6:.1f} | {p50:.1f} ({p20:.1f}, {p80:.1f}) "
                f"| {speed:.2f} | {share:.0%} |"
            )
            row = {**base, "kernel": name, "bytes": num_bytes, "us": [p50, p20, p80]}
            file.write(json.dumps({**row, "share_of_copy": share}) + "\n")


if __name__ == "__main__":
    main()
