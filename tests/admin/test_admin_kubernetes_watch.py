"""Replicas on Kubernetes follow each other, and keep the last good state if something is wrong."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_commands import Engine, running
from admin_support import ENTRY, add_key, add_tenant, bodies, patch
from kube_api import KubeApi, Refused

from spin_server.admin.administration import Administration
from spin_server.admin.errors import NotFoundError, UnavailableError
from spin_server.admin.store.interface import Change, Ref, StaleError, StoreError
from spin_server.admin.store.kubernetes import KubernetesStore, store
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio

Open = Callable[[], KubernetesStore]
A, B = Ref("tenant", "a"), Ref("tenant", "b")
SECONDS = 20.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait for something that a watch brings."""
    end = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def told(one: KubernetesStore) -> str | None:
    try:
        one.revision()
    except StoreError as error:
        return str(error)
    return None


@pytest.fixture
def replicas(open_kubernetes: Open) -> tuple[KubernetesStore, KubernetesStore]:
    return open_kubernetes(), open_kubernetes()


@pytest.fixture
def admin(open_kubernetes: Open) -> Administration:
    return Administration(open_kubernetes(), Policy())


def test_replica_follows_policies_and_keys(open_kubernetes: Open, admin: Administration) -> None:
    other = Administration(open_kubernetes(), Policy())
    add_tenant(admin, "a")
    key = add_key(admin, "a")
    patch(admin, "a", target_sparsity=0.5)
    until(lambda: other.refresh().revision == 3)
    assert other.state == admin.state
    assert other.state.key_ids == admin.state.key_ids
    assert list(other.state.key_ids.values()) == [key.key_id]


def test_writer_that_has_not_heard_yet_is_stale_and_then_up_to_date(
    api: KubeApi, open_kubernetes: Open
) -> None:
    api.forbidden = {("watch", "configmaps")}
    one, other = open_kubernetes(), open_kubernetes()
    one.commit(0, [Change(A, None, {"n": 1})], ENTRY)
    with pytest.raises(StaleError):
        other.commit(0, [Change(B, None, {"n": 2})], ENTRY)
    assert other.commit(1, [Change(B, None, {"n": 2})], ENTRY) == 2
    assert bodies(other.snapshot()) == {A: {"n": 1}, B: {"n": 2}}


@pytest.mark.parametrize("lost", ["compacted", "ended", "refused"])
def test_watch_that_ends_is_begun_again(
    api: KubeApi,
    open_kubernetes: Open,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    monkeypatch.setattr(store, "_LEAST_PAUSE_SECONDS", 0.01)
    if lost == "ended":
        monkeypatch.setattr(store, "_WATCH_SECONDS", 1)
    one, other = open_kubernetes(), open_kubernetes()
    if lost == "compacted":
        api.compact()
    failed: list[int] = []

    def refuse(when: str, verb: str, plural: str) -> None:
        if verb == "watch" and len(failed) < 6:
            failed.append(1)
            raise Refused(500, "InternalError", "not now")

    if lost == "refused":
        api.interfere = refuse
    before = len(api.requests)
    one.commit(0, [Change(A, None, {"n": 1})], ENTRY)
    until(lambda: other.revision() == 1)
    until(lambda: ("watch", "configmaps") in api.requests[before:] or lost == "refused")
    one.commit(1, [Change(B, None, {"n": 1})], ENTRY)
    until(lambda: other.revision() == 2)
    assert other.snapshot() == one.snapshot()


def test_silent_loss_of_events_is_made_good_by_reading_again(
    api: KubeApi, open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_WATCH_SECONDS", 1)

    def nothing(*_: object) -> Iterator[Any]:
        time.sleep(1)
        yield from ()

    monkeypatch.setattr(api, "events", nothing)
    one, other = open_kubernetes(), open_kubernetes()
    one.commit(0, [Change(A, None, {"n": 1})], ENTRY)
    until(lambda: other.revision() == 1)


def test_server_that_is_away_keeps_the_last_good_state_and_is_told(
    api: KubeApi, admin: Administration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LEAST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(store, "_COMMIT_SECONDS", 0.5)
    add_tenant(admin, "a")
    good = admin.state

    def away(*_: str) -> None:
        raise ConnectionError

    api.interfere = away
    with pytest.raises(UnavailableError):
        patch(admin, "a", target_sparsity=0.5)
    assert admin.refresh() is good
    assert admin.trouble is not None
    assert "Kubernetes: read ConfigMap llm/spin" in admin.trouble or "not known" in admin.trouble
    api.interfere = lambda *_: None
    until(lambda: admin.refresh() is good and admin.expire() is None and admin.trouble is None)
    assert patch(admin, "a", target_sparsity=0.5).state.revision == 2


# Objects that somebody else changed


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("policy.a", '{"revision":2,"body":{"fields":{"target_sparsity":"1"}}}', "by hand"),
        ("policy.a", "{", "JSONDecodeError"),
        ("policy.a", None, "by hand"),
        ("policy.b", '{"revision":2,"body":{"fields":{}}}', "by hand"),
        ("surprise", "x", "JSONDecodeError"),
        ("revision", "1", "by hand"),
        ("revision", "many", "ValueError"),
        ("format", "2", "expected a store of format 1, got format 2"),
        ("keys", "0123", "do not belong together"),
        ("log", "[]", "TypeError"),
    ],
)
def test_change_by_hand_is_told_and_taken_back(
    api: KubeApi, open_kubernetes: Open, admin: Administration, name: str, text: str, message: str
) -> None:
    add_tenant(admin, "a")
    patch(admin, "a", target_sparsity=0.5)
    good, before = admin.state, api.data("configmaps")
    store = admin.store
    assert isinstance(store, KubernetesStore)

    def spoil(data: dict[str, str]) -> None:
        data.pop(name, None)
        if text is not None:
            data[name] = text

    api.edit("configmaps", spoil)
    said = until(lambda: told(store))
    assert message in said
    assert "\n" not in said
    assert admin.refresh() is good
    with pytest.raises(UnavailableError):
        patch(admin, "a", target_sparsity=0.4)
    with pytest.raises(StoreError):
        open_kubernetes()
    api.edit("configmaps", lambda data: (data.clear(), data.update(before)))
    until(lambda: told(store) is None)
    assert patch(admin, "a", target_sparsity=0.4).state.revision == 3


def test_log_that_was_emptied_is_forgotten_and_nothing_ends(
    api: KubeApi, open_kubernetes: Open, admin: Administration
) -> None:
    other = Administration(open_kubernetes(), Policy())
    add_tenant(admin, "a")
    until(lambda: other.refresh().revision == 1)
    api.edit("configmaps", lambda data: data.update(log=""))
    until(lambda: admin.store.log(before=None, limit=9) == [])
    with pytest.raises(NotFoundError):
        admin.since(0)
    patch(admin, "a", target_sparsity=0.5)
    until(lambda: other.refresh().revision == 2)
    assert [commit.revision for commit in admin.since(1)] == [2]


@pytest.mark.parametrize("text", ["", "eJw=", "bm8gemxpYg=="])
def test_secret_that_cannot_be_read_is_told(
    api: KubeApi, open_kubernetes: Open, admin: Administration, text: str
) -> None:
    add_key(admin)
    api.edit("secrets", lambda data: data.update(keyring=text))
    with pytest.raises(StoreError, match="expected the Secret as this release writes it"):
        open_kubernetes()
    add_tenant_fails = pytest.raises(UnavailableError)
    with add_tenant_fails:  # the Secret is not watched: it is found out when it is needed
        add_key(admin)


@pytest.mark.parametrize("plural", ["configmaps", "secrets"])
def test_object_that_was_deleted_is_told_and_may_come_back(
    api: KubeApi, admin: Administration, plural: str
) -> None:
    add_tenant(admin, "a")
    key = add_key(admin)
    store, whole = admin.store, api.objects[plural, "spin"]
    assert isinstance(store, KubernetesStore)
    api.delete(plural)
    with pytest.raises(UnavailableError):
        add_key(admin)
    assert "it was deleted" in until(lambda: told(store))
    assert admin.state.key(key.key_id) is not None
    metadata = {"name": "spin", "namespace": "llm"}
    api.handle("create", plural, None, {**whole, "metadata": metadata})
    until(lambda: told(store) is None)
    assert add_key(admin) is not None
    assert admin.state.revision == 3


def older(api: KubeApi, admin: Administration) -> tuple[KubernetesStore, Callable[[], None]]:
    """Make two revisions; what brings the ConfigMap back to the first."""
    add_tenant(admin, "a")
    backup = api.data("configmaps")
    patch(admin, "a", target_sparsity=0.5)
    assert isinstance(admin.store, KubernetesStore)
    return admin.store, lambda: api.edit(
        "configmaps", lambda data: (data.clear(), data.update(backup))
    )


def test_store_that_is_put_back_is_not_followed(
    api: KubeApi, open_kubernetes: Open, admin: Administration
) -> None:
    store, put_back = older(api, admin)
    put_back()
    assert "was put back: expected what follows revision 2, got another revision 1" in until(
        lambda: told(store)
    )
    assert admin.refresh().revision == 2
    with pytest.raises(UnavailableError):
        patch(admin, "a", target_sparsity=0.4)
    again = Administration(open_kubernetes(), Policy())
    assert again.state.revision == 1


def test_store_that_is_put_back_and_went_on_elsewhere_is_not_followed(
    api: KubeApi, open_kubernetes: Open, admin: Administration
) -> None:
    store, put_back = older(api, admin)
    with store._writing:  # it hears of nothing meanwhile
        put_back()
        other = Administration(open_kubernetes(), Policy())
        for n in range(3):
            patch(other, "a", probe_period=n + 1)
    assert "was put back: expected what follows revision 2, got another revision 4" in until(
        lambda: told(store)
    )
    assert admin.refresh().revision == 2


def test_watch_that_ends_at_once_is_not_begun_again_at_once(
    api: KubeApi, open_kubernetes: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "events", lambda *_: iter(()))
    open_kubernetes()
    before = len(api.requests)
    time.sleep(1.5)
    assert len(api.requests) - before < 20


# Whole servers


def test_two_servers_on_one_store_apply_what_either_is_told(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    engines = [Engine(), Engine()]
    with (
        running("kubernetes://llm/spin", engines[0]) as one,
        running("kubernetes://llm/spin", engines[1]) as other,
    ):
        assert (one.first_key, other.first_key) == ("first-key of Secret llm/spin", None)
        key = base64.b64decode(api.data("secrets")["first-key"]).decode()
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}) as client:
            answer = client.patch(
                f"{one.url}/v1/policies/default",
                json={"target_sparsity": 0.5},
                headers={"If-Match": "*"},
            )
            assert answer.status_code == 200
            until(lambda: engines[1].rows[0].sparsity == Ratio.parse("s", "0.5"))
    assert json.loads(api.data("configmaps")["policy.default"])["revision"] == 2
