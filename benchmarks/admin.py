"""The admin layer with 1,000 tenants and 10,000 keys: what a lookup, a change and an apply take.

  python benchmarks/admin.py        on a laptop CPU; no engine, but its policy table
Times are of the work itself, without HTTP: medians and 95th percentiles. An apply is everything
from the stored change to rows that lie in the table and were read back.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, cpu_name
from many_tenants import AUTHOR, KEYS, TENANTS, fill

from spin_server.admin.access import authenticate
from spin_server.admin.administration import Administration
from spin_server.admin.applier import Applier
from spin_server.admin.documents import DEFAULT
from spin_server.admin.engine_link import CanaryRow, Figures, RankReport
from spin_server.admin.operations import patch_policy, together
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.engine.spin.policy_table import PolicyTable
from spin_server.policy.policy import Policy

REPEATS = 200
PATCH = {"target_sparsity": "0.5"}


class TableLink:
    """The engine's two copies of the table, the launcher's and a worker's, without the RPC."""

    first_row, capacity, reserved = 1, 1024, frozenset[str]()

    def __init__(self) -> None:
        self.wanted = PolicyTable(self.capacity, Policy())
        self.held = PolicyTable(self.capacity, Policy())

    async def apply(self, revision: int, rows: Mapping[int, Policy]) -> list[RankReport]:
        self.wanted.write_all(rows, revision)
        sent = json.dumps({str(row): policy.pack() for row, policy in rows.items()})
        received = json.loads(sent).items()
        self.held.write_all({int(r): Policy.unpack(p) for r, p in received}, revision)
        assert self.held.digest() == self.wanted.digest()
        return await self.reports()

    async def reports(self) -> list[RankReport]:
        return [RankReport(0, 0, self.held.revision)]

    async def figures(self) -> dict[str, Figures]:
        return {"default": Figures(0, 0, 0, 0)}

    def name_rows(self, rows: Mapping[str, int], canaries: Mapping[str, CanaryRow]) -> None:
        pass


def timed(work: Callable[[int], Any], repeats: int = REPEATS) -> list[float]:
    """Milliseconds: median, and 95th percentile."""
    times = []
    for index in range(repeats):
        started = time.perf_counter()
        work(index)
        times.append((time.perf_counter() - started) * 1000)
    return [float(t) for t in np.percentile(times, [50, 95])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/admin.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "admin.db")
        administration, now = Administration(store, Policy()), datetime.now(UTC)
        keys = fill(administration)
        names = administration.state.tenants
        halves = [patch_policy(n, PATCH, "*", now=now) for n in names[: TENANTS // 2]]
        administration.perform(together(halves), AUTHOR)  # the others have the default policy
        applier = Applier(administration, TableLink())
        fresh = [Applier(administration, TableLink()) for _ in range(20)]

        def first_apply(index: int) -> None:
            asyncio.run(fresh[index].catch_up())

        def apply(_: int) -> None:
            asyncio.run(applier.catch_up())

        def change(index: int, name: str = "", share: int = 10) -> None:
            patch = {"target_sparsity": f"0.{index % 87 + share}"}
            name = name or names[index]
            administration.perform(patch_policy(name, patch, "*", now=now), AUTHOR)

        def change_and_apply(index: int) -> None:
            change(index, share=11)
            apply(index)

        def change_of_all(index: int) -> None:
            change(index, DEFAULT)
            apply(index)

        def change_and_lookup(index: int) -> None:
            change(index, share=12)
            authenticated(index)

        def restart(_: int) -> None:
            Administration(store, Policy())

        def authenticated(index: int) -> None:
            secret = keys[index * 37 % KEYS].secret
            authenticate(administration.state, f"Bearer {secret}", now)

        authenticated(0)  # builds the index of a new state
        apply(0)
        figures = {
            "first apply, 1,001 rows": timed(first_apply, len(fresh)),
            "lookup of a key": timed(authenticated),
            "change of a tenant's policy": timed(change),
            "change, and its apply": timed(change_and_apply),
            "change, and a lookup right after": timed(change_and_lookup),
            "change of the default policy, 1 + 500 rows": timed(change_of_all, 40),
            "start on the store": timed(restart, 5),
        }
    print(f"{TENANTS:,} tenants, {KEYS:,} keys")
    for name, (median, high) in figures.items():
        print(f"| {name} | {median:.3f} ms | {high:.3f} ms |")
    row = {"commit": commit(), "cpu": cpu_name(), "tenants": TENANTS, "keys": KEYS, **figures}
    with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
