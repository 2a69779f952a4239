"""A process that writes to a store, and says on a line of its own what was acknowledged.

`random STORE SEED` creates, patches and deletes documents until it is killed; `count STORE TIMES`
adds to one number, again where somebody else wrote first.
"""

import json
import random
import subprocess
import sys
import time

from spin_server.admin.opening import open_store
from spin_server.admin.store.interface import (
    Body,
    Change,
    Commit,
    Entry,
    Ref,
    StaleError,
    Store,
)

WRITER = [sys.executable, __file__]
ENTRY = Entry("2026-01-01T00:00:00Z", "[writer]", "write")


def write_at_random(store: Store, seed: int) -> None:
    draw = random.Random(seed)
    snapshot = store.snapshot()
    revision = snapshot.revision
    documents = {ref: document.body for ref, document in snapshot.documents.items()}
    while True:
        after: dict[Ref, dict[str, object] | None] = {}
        for name in draw.sample(range(12), draw.randint(1, 3)):
            ref = Ref(draw.choice(("policy", "tenant", "key")), f"name-{name}")
            before = documents.get(ref)
            if before is not None and draw.random() < 0.3:
                after[ref] = None
            else:
                key = draw.choice("abc")
                after[ref] = {**(before or {}), key: "x" * draw.randint(0, 3000), "seed": seed}
        changes = [Change(ref, documents.get(ref), body) for ref, body in after.items()]
        revision = store.commit(revision, changes, ENTRY)
        print(json.dumps([revision, [[*ref, body] for ref, body in after.items()]]), flush=True)
        for ref, body in after.items():
            documents.pop(ref, None)
            if body is not None:
                documents[ref] = body


def count(store: Store, times: int) -> None:
    ref = Ref("tenant", "counter")
    while times:
        snapshot = store.snapshot()
        before = snapshot.documents[ref].body if ref in snapshot.documents else None
        after = {"count": 1 + (before["count"] if before else 0)}
        try:
            revision = store.commit(snapshot.revision, [Change(ref, before, after)], ENTRY)
        except StaleError:
            continue
        print(revision, flush=True)
        times -= 1


def acknowledged_until_killed(store: str, seed: int) -> list[tuple[int, dict[Ref, Body | None]]]:
    """Kill a writer at a random moment; get what it said was written."""
    draw = random.Random(seed)
    with subprocess.Popen(
        [*WRITER, "random", store, str(seed)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(draw.randint(20, 30))]
        time.sleep(draw.uniform(0, 0.01))  # a write takes less: a moment anywhere in one
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
    assert child.returncode == -9
    # Only a whole line was said.
    said = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(at, {Ref(k, n): body for k, n, body in written}) for at, written in said]


def written(commit: Commit) -> dict[Ref, Body | None]:
    return {change.ref: change.after for change in commit.changes}


if __name__ == "__main__":
    {"random": write_at_random, "count": count}[sys.argv[1]](
        open_store(sys.argv[2])[0], int(sys.argv[3])
    )
