"""Writers of the store on Kubernetes, interleaved at every request, that fail, crash and come late.

No HTTP and no watch: an API server in memory, whose requests are the only points at which another
writer may go on. A write may be lost before or after it is carried out, or be carried out long
after its sender has given up.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from admin_support import replay

from spin_server.admin.store.interface import (
    Body,
    Change,
    Entry,
    Ref,
    StaleError,
    StoreError,
    UnknownOutcomeError,
)
from spin_server.admin.store.kubernetes import KubernetesStore
from spin_server.admin.store.kubernetes.objects import (
    BusyError,
    ChangedError,
    Stored,
    UnansweredError,
)

REFS = [Ref("tenant", "a"), Ref("tenant", "b"), Ref("key", "k"), Ref("key", "l")]
FATES = {"before": 0.05, "busy": 0.03, "late": 0.08, "after": 0.05, "crash after": 0.03}
WRITERS, COMMITS, RUNS = 4, 8, 80


class CrashError(BaseException):
    """The process is gone."""


class Turns:
    """Lets one thread run at a time, and another at every request."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._live: dict[str, threading.Event] = {}

    def give(self, name: str) -> None:
        if name in self._live:
            self._live[name].clear()
            self._next()
            self._live[name].wait()

    def _next(self) -> None:
        if self._live:
            self._live[self._draw.choice(sorted(self._live))].set()

    def run(self, jobs: dict[str, Callable[[], None]]) -> None:
        def body(name: str, job: Callable[[], None]) -> None:
            self._live[name].wait()
            try:
                job()
            finally:
                del self._live[name]
                self._next()

        self._live = {name: threading.Event() for name in jobs}
        threads = [threading.Thread(target=body, args=job) for job in jobs.items()]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


class Api:
    """The two objects, and the writes that are still on their way."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.troubled = draw, True
        self.objects: dict[str, tuple[int, dict[str, bytes]]] = {}
        self.late: list[tuple[str, int, dict[str, bytes]]] = []
        self._version = 100

    def put(self, kind: str, version: int, data: dict[str, bytes]) -> int | None:
        found = self.objects[kind]
        if found[0] != version:
            return None
        if found[1] == data:  # what is there already changes no version
            return version
        self._version += 1
        self.objects[kind] = (self._version, data)
        return self._version

    def deliver(self, chance: float) -> None:
        """Carry out some of what is late."""
        while self.late and self.draw.random() < chance:
            self.put(*self.late.pop(self.draw.randrange(len(self.late))))

    def fate(self) -> str:
        if not self.troubled:
            return ""
        drawn = self.draw.random()
        for fate, share in FATES.items():
            if drawn < share:
                return fate
            drawn -= share
        return ""


@dataclass
class ModelCluster:
    """Stands in for `Cluster`."""

    api: Api
    turns: Turns
    name: str

    def shown(self, kind: str) -> str:
        return kind

    def close(self) -> None:
        pass

    def _request(self) -> None:
        self.turns.give(self.name)
        self.api.deliver(0.1)
        if self.api.troubled and self.api.draw.random() < 0.02:
            raise CrashError

    def get(self, kind: str) -> Stored | None:
        self._request()
        if self.api.troubled and self.api.draw.random() < 0.05:
            raise UnansweredError("get")
        if kind not in self.api.objects:
            return None
        version, data = self.api.objects[kind]
        return Stored(str(version), dict(data), None)

    def create(self, kind: str) -> None:
        self._request()
        self.api.objects.setdefault(kind, (1, {}))

    def replace(self, kind: str, found: Stored, data: dict[str, bytes]) -> Stored:
        self._request()
        write, fate = (kind, int(found.version), dict(data)), self.api.fate()
        if fate == "before":
            raise UnansweredError(fate)
        if fate == "busy":
            raise BusyError(fate)
        if fate == "late":
            self.api.late.append(write)
            raise UnansweredError(fate)
        version = self.api.put(*write)
        if fate == "after":
            raise UnansweredError(fate)
        if fate == "crash after":
            raise CrashError
        if version is None:
            raise ChangedError("conflict")
        return Stored(str(version), dict(data), None)


class NoTime:
    """An event that nobody waits for."""

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        pass

    def wait(self, *_: object) -> bool:
        return False


@dataclass
class Told:
    """What the writers were told of their commits."""

    made: dict[str, int] = field(default_factory=dict)
    not_made: set[str] = field(default_factory=set)


def open_store(cluster: ModelCluster) -> KubernetesStore:
    store = KubernetesStore(cluster)  # type: ignore[arg-type]
    store._closed = NoTime()  # type: ignore[assignment]
    return store


def refresh(store: KubernetesStore) -> None:
    with store._writing:
        store._refresh()


def changes(store: KubernetesStore, refs: list[Ref]) -> tuple[int, list[Change]]:
    """Add to numbers, so that a lost update shows."""
    snapshot, found = store.snapshot(), []
    for ref in refs:
        document = snapshot.documents.get(ref)
        before = None if document is None else document.body
        found.append(Change(ref, before, {"n": 1 + (before["n"] if before else 0)}))
    return snapshot.revision, found


def write(name: str, cluster: ModelCluster, told: Told) -> None:
    store, draw = None, cluster.api.draw
    for number in range(COMMITS):
        commit = f"{name}.{number}"
        try:
            if store is None:
                store = open_store(cluster)
            if store._trouble is not None or draw.random() < 0.3:
                refresh(store)
            base, wanted = changes(store, draw.sample(REFS, draw.choice([1, 1, 2, 3])))
        except CrashError:
            store = None
            continue
        except StoreError:
            continue
        try:
            told.made[commit] = store.commit(base, wanted, Entry("t", "w", "a", commit))
        except CrashError:
            store = None
        except UnknownOutcomeError:
            pass
        except (StaleError, StoreError):
            told.not_made.add(commit)


@pytest.fixture(autouse=True)
def _no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KubernetesStore, "_follow", lambda _: None)


@pytest.mark.parametrize("seed", range(4))
def test_writers_were_told_the_truth_and_lost_nothing(seed: int) -> None:
    made = not_made = 0
    for run in range(RUNS // 4):
        draw = random.Random(1000 * seed + run)
        api, turns, told = Api(draw), Turns(draw), Told()
        names = [f"w{number}" for number in range(WRITERS)]
        turns.run({n: partial(write, n, ModelCluster(api, turns, n), told) for n in names})
        api.troubled = False
        api.deliver(1.0)
        store = open_store(ModelCluster(api, turns, "end"))
        log = {commit.entry.reason: commit for commit in store.since(0)}
        assert len(log) == store.revision()
        assert {name: log[name].revision for name in told.made} == told.made, run
        assert not told.not_made & log.keys(), run
        replayed: dict[Ref, Body] = {}
        replay(log.values(), replayed)
        found: dict[Any, Body] = {
            ref: document.body for ref, document in store.snapshot().documents.items()
        }
        assert replayed == found
        for _ in range(3):  # nobody left anything behind that stops others
            store.commit(*changes(store, REFS), Entry("t", "w", "a", "end"))
        made, not_made = made + len(told.made), not_made + len(told.not_made)
    assert min(made, not_made) > 100
