"""Prefill scoring by matrix products against vLLM's CPU operator.

Run: .venv/bin/python benchmarks/prefill_scoring.py
Prints the table of docs/log.md. The operator is slow: 64 heads take minutes.
"""

import argparse
import os
import time

import torch
from vllm import _custom_ops  # loads vLLM's CPU library

from spin_server.engine.cpu.prefill_scoring import paged_mqa_logits_gemm

BLOCK_SIZE, HEAD_SIZE, TOP_K = 64, 128, 512


def inputs(rows: int, heads: int, slots: int) -> tuple[object, ...]:
    """One request whose last `rows` tokens are scored, four tokens to a slot."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-slots // BLOCK_SIZE)
    keys = torch.randn(pages, BLOCK_SIZE * HEAD_SIZE, generator=generator)
    scales = torch.rand(pages, BLOCK_SIZE, generator=generator) + 0.5
    cache = torch.cat(
        [keys.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], dim=1
    )
    q = torch.randn(rows, heads, HEAD_SIZE, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.rand(rows, heads, generator=generator)
    seq_lens = (slots - (rows - 1 - torch.arange(rows)) // 4).int()
    table = torch.randperm(pages, generator=generator).int().expand(rows, pages).contiguous()
    return q, cache, weights, seq_lens, table, BLOCK_SIZE, slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--slots", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.rows} rows, {args.threads} threads")
    print("| index heads x slots | operator | matrix products | speed-up | max difference |")
    print("|---|---|---|---|---|")
    for heads in args.heads:
        for slots in args.slots:
            case = inputs(args.rows, heads, slots)
            started = time.perf_counter()
            expected = _custom_ops.fp8_paged_mqa_logits_cpu(*case)
            operator = time.perf_counter() - started
            best = float("inf")
            for _ in range(5):
                started = time.perf_counter()
                got = paged_mqa_logits_gemm(*case)
                best = min(best, time.perf_counter() - started)
            visible = torch.arange(slots) < case[3][:, None]
            largest = expected[visible].abs().max()
            difference = ((got - expected)[visible].abs().max() / largest).item()
            print(
                f"| {heads} x {slots:,} | {operator:.2f} s | {best:.3f} s "
                f"| {operator / best:.0f}x | {difference:.0e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
