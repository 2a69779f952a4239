"""How much the store on Kubernetes holds, and where its first key is."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from admin_support import BOTH, ENTRY, KEY, LAUNCH, TENANT, add_key, bodies
from kube_api import KubeApi

from spin_server.admin.administration import Administration
from spin_server.admin.errors import NotFoundError
from spin_server.admin.store.interface import (
    Change,
    ForgottenError,
    Ref,
    StoreError,
)
from spin_server.admin.store.kubernetes import Cluster, KubernetesStore, SecretEntry
from spin_server.errors import InputError
from spin_server.policy.policy import Policy

Open = Callable[[], KubernetesStore]


def test_ten_thousand_keys_and_a_thousand_tenants_fit(kubernetes: KubernetesStore) -> None:
    draw = random.Random(1)
    keys = [
        Change(
            Ref("key", f"key-{draw.randbytes(8).hex()}"),
            None,
            {
                "sha256": draw.randbytes(32).hex(),
                "prefix": f"spin_{draw.randbytes(3).hex()}",
                "tenant": f"tenant-{n % 1000}",
                "scopes": ["read", "write"],
                "description": f"agent {n}",
                "created_at": f"2026-01-01T00:{n % 60:02}:{n // 60 % 60:02}Z",
                "expires_at": None,
                "replaced_by": None,
            },
        )
        for n in range(10_000)
    ]
    tenants = [
        Change(Ref(kind, f"tenant-{n}"), None, body)
        for n in range(1000)
        for kind, body in (
            ("tenant", {"description": f"team {n}", "created_at": "2026-01-01T00:00:00Z"}),
            ("policy", {"fields": LAUNCH, "expires": None}),
        )
    ]
    for start in range(0, 10_000, 1000):
        kubernetes.commit(start // 1000, keys[start : start + 1000], ENTRY)
    kubernetes.commit(10, tenants, ENTRY)
    assert len(kubernetes.snapshot().documents) == 12_000


@pytest.mark.parametrize(("kind", "shown"), [("tenant", "ConfigMap"), ("key", "Secret")])
def test_full_object_is_told_and_nothing_is_written(
    kubernetes: KubernetesStore, open_kubernetes: Open, kind: str, shown: str
) -> None:
    kubernetes.commit(0, BOTH, ENTRY)
    large = {"n": random.Random(2).randbytes(1_200_000).hex()}
    with pytest.raises(StoreError, match=f"the {shown} is full: expected at most 900,000 bytes"):
        kubernetes.commit(1, [Change(Ref(kind, "b"), None, large)], ENTRY)  # type: ignore[arg-type]
    assert kubernetes.commit(1, [Change(TENANT, {"n": 1}, {"n": 2})], ENTRY) == 2
    assert bodies(open_kubernetes().snapshot()) == {TENANT: {"n": 2}, KEY: {"n": 1}}


def test_full_secret_can_be_emptied(kubernetes: KubernetesStore, open_kubernetes: Open) -> None:
    draw, added = random.Random(3), []
    revision = 0

    def add() -> int:
        ref, body = Ref("key", f"key-{len(added)}"), {"text": draw.randbytes(40_000).hex()}
        added.append((ref, body))
        return kubernetes.commit(revision, [Change(ref, None, body)], ENTRY)

    def fill() -> None:
        nonlocal revision
        while True:
            revision = add()

    with pytest.raises(StoreError, match="the Secret is full: expected at most 900,000 bytes"):
        fill()
    added.pop()
    assert len(added) > 15
    for ref, body in added:
        revision = kubernetes.commit(revision, [Change(ref, body, None)], ENTRY)
    assert bodies(open_kubernetes().snapshot()) == {}
    assert kubernetes.commit(revision, BOTH, ENTRY) == revision + 1


def test_log_forgets_its_oldest_and_says_so(open_kubernetes: Open) -> None:
    admin = Administration(open_kubernetes(), Policy())
    for n in range(60):
        body = {"n": n, "text": "x" * 10_000}
        admin.store.commit(n, [Change(TENANT, None, body)], ENTRY)
    log = admin.store.log(before=None, limit=100)
    assert 20 <= len(log) < 60
    assert [commit.revision for commit in log] == list(range(60, 60 - len(log), -1))
    oldest = 60 - len(log)
    assert len(admin.store.since(oldest)) == len(log)
    with pytest.raises(ForgottenError, match=rf"expected revision {oldest} or later, got 3"):
        admin.store.since(3)
    with pytest.raises(NotFoundError, match="the log on Kubernetes is bounded"):
        admin.since(3)


# The first key


def test_first_key_is_in_the_secret_until_somebody_takes_it_out(
    api: KubeApi, open_kubernetes: Open
) -> None:
    stores = [open_kubernetes(), open_kubernetes()]
    together = threading.Barrier(2)

    def start(store: KubernetesStore) -> bool:
        admin = Administration(store, Policy())
        together.wait()
        return admin.bootstrap(SecretEntry(store))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(start, stores)) == [False, True]
    assert sorted(api.data("secrets")) == ["first-key", "keyring"]
    assert SecretEntry(stores[0]).shown == "first-key of Secret llm/spin"
    api.edit("secrets", lambda data: data.pop("first-key"))
    admin = Administration(open_kubernetes(), Policy())
    add_key(admin)
    assert not admin.bootstrap(SecretEntry(stores[1]))
    assert sorted(api.data("secrets")) == ["keyring"]


@pytest.mark.parametrize("failing", ["put", "show"])
def test_start_that_was_cut_short_leaves_a_key_that_is_shown_or_forgotten(
    api: KubeApi, open_kubernetes: Open, failing: str
) -> None:
    store = open_kubernetes()
    place, admin = SecretEntry(store), Administration(store, Policy())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if failing == "put":
        admin.perform = stop  # type: ignore[assignment, method-assign]
        place.withdraw = stop  # type: ignore[assignment, method-assign]
    else:
        place.show = stop  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        admin.bootstrap(place)
    assert [n.split("-")[:2] for n in api.data("secrets") if n != "keyring"] == [
        ["first", "key.key"]
    ]
    again = open_kubernetes()
    assert Administration(again, Policy()).bootstrap(SecretEntry(again)) is (failing == "put")
    assert sorted(api.data("secrets")) == ["first-key", "keyring"]


@pytest.mark.parametrize("text", [None, "", "[]", "{", "clusters: 1", "\x00", "users: [1]"])
def test_cluster_without_a_way_to_it_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "none").write_text(text)
    with pytest.raises(
        InputError, match="expected a pod's service account or a kubeconfig"
    ) as found:
        Cluster("llm", "spin", str(tmp_path / "none"))
    assert "\n" not in str(found.value)
