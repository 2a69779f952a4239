"""The store on Kubernetes commits to a ConfigMap and a Secret as if they were one."""

import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from admin_support import BOTH, ENTRY, KEY, TENANT, add_key, add_tenant, bodies, patch, replay
from kube_api import KubeApi, Refused
from store_writer import acknowledged_until_killed, written

from spin_server.admin.administration import Administration
from spin_server.admin.store.interface import (
    Body,
    Change,
    Ref,
    StaleError,
    StoreError,
    UnknownOutcomeError,
)
from spin_server.admin.store.kubernetes import KubernetesStore
from spin_server.admin.store.kubernetes import store as kubernetes_store
from spin_server.policy.policy import Policy

Open = Callable[[], KubernetesStore]
KILLS = 6


def add_one(store: KubernetesStore, ref: Ref) -> bool:
    """Add to a number, so that a lost update shows; say whether it was written."""
    try:
        snapshot = store.snapshot()
        found = snapshot.documents.get(ref)
        before = found.body if found is not None else None
        after = {"n": 1 + (before["n"] if before else 0)}
        store.commit(snapshot.revision, [Change(ref, before, after)], ENTRY)
    except (StaleError, StoreError) as error:
        if "not known" in str(error):
            raise
        return False
    return True


# What is where


def test_policies_can_be_read_in_the_config_map_and_keys_cannot(
    api: KubeApi, open_kubernetes: Open
) -> None:
    admin = Administration(open_kubernetes(), Policy())
    add_tenant(admin, "a")
    patch(admin, "a", target_sparsity=0.5)
    key = add_key(admin, "a")
    data = api.data("configmaps")
    assert json.loads(data["policy.a"]) == {
        "revision": 2,
        "body": {"fields": {"target_sparsity": "0.5"}},
    }
    assert (data["revision"], sorted(api.data("secrets"))) == ("3", ["keyring"])
    document = admin.state.key(key.key_id)
    assert document is not None
    for hidden in (document.sha256, document.prefix, key.secret):
        assert hidden not in json.dumps(data)
    assert key.secret not in json.dumps(api.data("secrets"))


def test_objects_of_a_chart_are_filled_and_keep_their_labels(
    api: KubeApi, open_kubernetes: Open
) -> None:
    labels = {"app.kubernetes.io/managed-by": "Helm"}
    for plural in ("configmaps", "secrets"):
        metadata = {"name": "spin", "namespace": "llm", "labels": labels}
        api.handle("create", plural, None, {"metadata": metadata})
    api.forbidden = {("create", "configmaps"), ("create", "secrets")}
    store = open_kubernetes()
    assert store.commit(0, BOTH, ENTRY) == 1
    for plural in ("configmaps", "secrets"):
        assert api.objects[plural, "spin"]["metadata"]["labels"] == labels
    assert bodies(open_kubernetes().snapshot()) == {TENANT: {"n": 1}, KEY: {"n": 1}}


def test_nothing_but_keys_leaves_the_secret_alone(
    api: KubeApi, kubernetes: KubernetesStore
) -> None:
    api.requests.clear()
    kubernetes.commit(0, BOTH[:1], ENTRY)
    assert [r for r in api.requests if r[0] == "update"] == [("update", "configmaps")]


@pytest.mark.parametrize("plural", ["configmaps", "secrets"])
@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_missing_permission_is_told_in_one_line(
    api: KubeApi, open_kubernetes: Open, verb: str, plural: str
) -> None:
    api.forbidden = {(verb, plural)}
    with pytest.raises(StoreError) as caught:
        open_kubernetes().commit(0, BOTH, ENTRY)
    kind = {"configmaps": "ConfigMap", "secrets": "Secret"}[plural]
    assert re.fullmatch(
        rf"Kubernetes: \w+ {kind} llm/spin: expected .*, got 403 .*", str(caught.value)
    )


# Commits


@pytest.mark.parametrize("plural", ["configmaps", "secrets"])
@pytest.mark.parametrize(
    ("when", "answer"),
    [("before", 429), *((when, a) for when in ("before", "after") for a in (500, 503, "lost"))],
)
def test_commit_that_meets_a_failure_is_whole_or_not_there(
    api: KubeApi, open_kubernetes: Open, plural: str, when: str, answer: int | str
) -> None:
    store, failed = open_kubernetes(), []

    def fail_once(at: str, verb: str, of: str) -> None:
        if (at, verb, of) == (when, "update", plural) and not failed:
            failed.append(answer)
            if isinstance(answer, str):
                raise ConnectionError
            raise Refused(answer, "Failure", "try again")

    api.interfere = fail_once
    expected = {TENANT: {"n": 1}, KEY: {"n": 1}}
    if (plural, when) == ("configmaps", "after"):
        assert store.commit(0, BOTH, ENTRY) == 1
    else:
        with pytest.raises(StoreError):
            store.commit(0, BOTH, ENTRY)
        assert store.revision() == 0
        assert bodies(open_kubernetes().snapshot()) == {}
        assert store.commit(0, BOTH, ENTRY) == 1
    assert failed
    assert bodies(store.snapshot()) == bodies(open_kubernetes().snapshot()) == expected
    assert [commit.revision for commit in open_kubernetes().since(0)] == [1]
    assert sorted(c.ref for c in open_kubernetes().since(0)[0].changes) == [KEY, TENANT]


def test_commit_that_nobody_answers_for_says_so(
    api: KubeApi, open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_kubernetes()
    down = threading.Event()

    def fail(when: str, verb: str, plural: str) -> None:
        if (when, verb, plural) == ("after", "update", "configmaps"):
            down.set()
        if down.is_set():
            raise ConnectionError

    api.interfere = fail
    monkeypatch.setattr(kubernetes_store, "_COMMIT_SECONDS", 0.5)
    with pytest.raises(UnknownOutcomeError, match="it is not known whether it was written"):
        store.commit(0, BOTH, ENTRY)
    with pytest.raises(StoreError):
        store.revision()
    api.interfere = lambda *_: None
    assert bodies(open_kubernetes().snapshot()) == {TENANT: {"n": 1}, KEY: {"n": 1}}


def test_commit_whose_log_entry_is_gone_is_not_called_unwritten(
    api: KubeApi, open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_store, "_COMMIT_SECONDS", 0.5)
    store, other, lost = open_kubernetes(), open_kubernetes(), []
    large = [
        Change(Ref("tenant", f"t{n}"), None, {"text": "x" * 3000}) for n in range(100)
    ]  # more than the log has room for

    def lose(when: str, verb: str, plural: str) -> None:
        if (when, verb, plural) == ("after", "update", "configmaps") and not lost:
            lost.append(True)
            raise ConnectionError

    read = store._read

    def overtaken(end: float | None = None) -> Any:
        while other.revision() < 1:
            time.sleep(0.005)
        if other.revision() == 1:
            other.commit(1, [Change(TENANT, None, {"n": 1})], ENTRY)
        return read(end)

    api.interfere = lose
    monkeypatch.setattr(store, "_read", overtaken)
    with pytest.raises(UnknownOutcomeError):
        store.commit(0, large, ENTRY)
    assert len(open_kubernetes().snapshot().documents) == 101


def test_write_that_a_proxy_sends_twice_is_made_once(
    open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_kubernetes()
    replace = store._cluster.replace

    def twice(*arguments: Any) -> Any:
        replace(*arguments)
        return replace(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(store._cluster, "replace", twice)
        assert store.commit(0, BOTH[:1], ENTRY) == 1
    assert store.commit(1, [Change(TENANT, {"n": 1}, {"n": 2})], ENTRY) == 2


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b"{}"])
def test_answer_that_is_not_kubernetes_is_an_error_of_the_store(
    api: KubeApi, open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(kubernetes_store, "_COMMIT_SECONDS", 0.2)
    store = open_kubernetes()
    api.instead = body
    with pytest.raises(StoreError):
        store.commit(0, BOTH, ENTRY)
    api.instead = None
    assert open_kubernetes().revision() in (0, 1)


def test_reason_of_a_refusal_is_shown(api: KubeApi, open_kubernetes: Open) -> None:
    store = open_kubernetes()

    def deny(when: str, verb: str, plural: str) -> None:
        if verb == "update":
            raise Refused(403, "Forbidden", "exceeded quota: count/configmaps")

    api.interfere = deny
    with pytest.raises(StoreError, match=r"got 403 .*: exceeded quota: count/configmaps"):
        store.commit(0, BOTH, ENTRY)


def test_writer_that_was_held_up_between_the_objects_cannot_commit_any_more(
    api: KubeApi, open_kubernetes: Open
) -> None:
    slow, fast = open_kubernetes(), open_kubernetes()
    reached, go_on = threading.Event(), threading.Event()
    replace = slow._cluster.replace

    def held(kind: str, *arguments: object) -> object:
        if kind == "config_map" and not reached.is_set():
            reached.set()
            assert go_on.wait(20)
        return replace(kind, *arguments)  # type: ignore[arg-type]

    slow._cluster.replace = held  # type: ignore[assignment, method-assign]
    mine, other = Ref("key", "slow"), Ref("key", "fast")
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(slow.commit, 0, [Change(mine, None, {"n": 1})], ENTRY)
        assert reached.wait(20)
        # The other finds what is pending in the Secret, and may not know whether it was made.
        while True:
            try:
                assert fast.commit(0, [Change(other, None, {"n": 2})], ENTRY) == 1
                break
            except StaleError:
                continue
        go_on.set()
        with pytest.raises(StaleError):
            commit.result(20)
    assert bodies(open_kubernetes().snapshot()) == {other: {"n": 2}}
    assert slow.commit(1, [Change(mine, None, {"n": 1})], ENTRY) == 2
    assert bodies(open_kubernetes().snapshot()) == {mine: {"n": 1}, other: {"n": 2}}


def test_writers_lose_no_update_while_the_server_fails(api: KubeApi, open_kubernetes: Open) -> None:
    draw, times = random.Random(5), 25

    def fail_at_times(when: str, verb: str, plural: str) -> None:
        if verb != "create" and draw.random() < 0.04:
            if draw.random() < 0.5:
                raise ConnectionError
            raise Refused(500, "InternalError", "etcdserver: leader changed")

    def count(store: KubernetesStore, ref: Ref) -> None:
        done = 0
        while done < times:
            done += add_one(store, ref)

    stores = [open_kubernetes(), open_kubernetes()]
    api.interfere = fail_at_times
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, stores * 2, (TENANT, TENANT, KEY, KEY)))
    api.interfere = lambda *_: None
    found = open_kubernetes()
    assert bodies(found.snapshot()) == {TENANT: {"n": 2 * times}, KEY: {"n": 2 * times}}
    replayed: dict[Ref, Body] = {}
    replay(found.since(0), replayed)
    assert replayed == bodies(found.snapshot())


def test_every_acknowledged_write_survives_when_killed(
    api: KubeApi, open_kubernetes: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    replayed: dict[Ref, Body] = {}
    newest = 0
    for seed in range(KILLS):
        acknowledged = acknowledged_until_killed("kubernetes://llm/spin", seed)
        store = open_kubernetes()
        commits, snapshot = store.since(newest), store.snapshot()
        found = {commit.revision: written(commit) for commit in commits}
        assert {at: found[at] for at, _ in acknowledged} == dict(acknowledged)
        assert snapshot.revision - acknowledged[-1][0] in (0, 1)
        replay(commits, replayed)
        assert replayed == bodies(snapshot)
        newest = snapshot.revision
