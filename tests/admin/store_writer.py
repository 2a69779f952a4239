"""A process that writes to a store, and says on a line of its own what was acknowledged.

`random PATH SEED` creates, patches and deletes documents until it is killed; `count PATH TIMES`
adds to one number, again where somebody else wrote first.
"""

import json
import random
import sys
from pathlib import Path

from spin_server.admin.store.interface import Change, Entry, Ref, StaleError
from spin_server.admin.store.sqlite import SqliteStore

ENTRY = Entry("2026-01-01T00:00:00Z", "[writer]", "write")


def write_at_random(store: SqliteStore, seed: int) -> None:
    draw = random.Random(seed)
    snapshot = store.snapshot()
    revision = snapshot.revision
    documents = {ref: document.body for ref, document in snapshot.documents.items()}
    while True:
        after: dict[Ref, dict[str, object] | None] = {}
        for name in draw.sample(range(12), draw.randint(1, 3)):
            ref = Ref(draw.choice(("policy", "tenant")), f"name-{name}")
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


def count(store: SqliteStore, times: int) -> None:
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


if __name__ == "__main__":
    {"random": write_at_random, "count": count}[sys.argv[1]](
        SqliteStore(Path(sys.argv[2])), int(sys.argv[3])
    )
