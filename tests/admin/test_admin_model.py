"""Any sequence of operations beside a plain model of the documents."""

import tempfile
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from admin_support import (
    EVERY_SCOPE,
    Clock,
    add_key,
    do,
    documents,
    revert,
    sent,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from spin_server.admin.administration import Administration
from spin_server.admin.documents import timestamp
from spin_server.admin.errors import (
    RefusedError,
)
from spin_server.admin.operations import (
    create_tenant,
    delete_tenant,
    patch_policy,
    patch_tenant,
)
from spin_server.admin.store.interface import Ref
from spin_server.admin.store.sqlite import SqliteStore
from spin_server.policy.policy import Policy

NAMES = ["default", "a", "b"]


VALUES: dict[str, list[Any]] = {
    "target_sparsity": [None, "0.1", "0.9"],
    "exploration_policy": [None, "none"],
    "probe_period": [None, 0, 8],
}


STEPS = st.one_of(
    st.tuples(st.just("create"), st.sampled_from(NAMES)),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(st.just("describe"), st.sampled_from(NAMES), st.sampled_from("xy")),
    st.tuples(
        st.just("patch"),
        st.sampled_from(NAMES),
        st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VALUES.items()}),
        st.sampled_from([None, None, 5, 20]),
    ),
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("revert"), st.floats(0, 1)),
)


Documents = dict[tuple[str, str], dict[str, Any]]


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(fields)
    for field, value in changes.items():
        result.pop(field, None)
        if value is not None:
            result[field] = value
    return result


class Model:
    """What the documents ought to be after each step, by the plainest means."""

    def __init__(self) -> None:
        self.documents: Documents = {}
        self.history: list[Documents] = [{}]

    def end(self, now: datetime) -> None:
        for ref, body in list(self.documents.items()):
            if "expires" in body and body["expires"]["at"] <= timestamp(now):
                del self.documents[ref]
                if body["expires"]["restore"]:
                    self.documents[ref] = {"fields": body["expires"]["restore"]}

    def create(self, name: str, now: datetime) -> None:
        if name != "default" and ("tenant", name) not in self.documents:
            body = {"description": "", "created_at": timestamp(now)}
            self.documents["tenant", name] = body

    def delete(self, name: str) -> None:
        if self.documents.pop(("tenant", name), None) is not None:
            self.documents.pop(("policy", name), None)

    def describe(self, name: str, text: str) -> None:
        if (ref := ("tenant", name)) in self.documents:
            self.documents[ref] = {**self.documents[ref], "description": text}

    def patch(self, name: str, changes: dict[str, Any], ttl: int | None, end: str) -> None:
        if name != "default" and ("tenant", name) not in self.documents:
            return
        if ttl is not None and not changes:  # refused
            return
        body = self.documents.pop(("policy", name), {"fields": {}})
        expires, fields = body.get("expires"), merged(body["fields"], changes)
        if ttl is not None:
            expires = {"at": end, "restore": expires["restore"] if expires else body["fields"]}
        elif expires:
            expires = {"at": expires["at"], "restore": merged(expires["restore"], changes)}
        if expires and expires["restore"] != fields:
            self.documents["policy", name] = {"fields": fields, "expires": expires}
        elif fields:
            self.documents["policy", name] = {"fields": fields}

    def note(self) -> None:
        """A revision, if anything changed."""
        if self.documents != self.history[-1]:
            self.history.append(dict(self.documents))


def take(step: tuple[Any, ...], admin: Administration, clock: Clock, model: Model) -> None:
    kind, *rest = step
    now = clock()
    try:
        if kind == "create":
            model.create(rest[0], now)
            do(admin, create_tenant(rest[0], "", now=now))
        elif kind == "delete":
            model.delete(rest[0])
            do(admin, delete_tenant(rest[0], "*"))
        elif kind == "describe":
            model.describe(*rest)
            do(admin, patch_tenant(rest[0], "*", description=rest[1]))
        elif kind == "patch":
            name, changes, ttl = rest
            clock.advance(ttl or 0)
            model.patch(name, changes, ttl, timestamp(clock()))
            clock.advance(-(ttl or 0))
            do(admin, patch_policy(name, sent(**changes), "*", now=now, ttl_seconds=ttl))
        elif kind == "wait":
            clock.advance(rest[0])
            model.end(clock())
            admin.expire()
        else:
            revision = round(rest[0] * (len(model.history) - 1))
            model.documents = dict(model.history[revision])
            model.end(clock())
            revert(admin, revision)
    except RefusedError:
        assert model.documents == model.history[-1]
    model.note()


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, min_size=15, max_size=40))
def test_documents_equal_a_plain_model_at_every_revision(steps: list[tuple[Any, ...]]) -> None:
    clock, model = Clock(), Model()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(SqliteStore(Path(folder) / "admin.db")) as store,
    ):
        admin = Administration(store, Policy(), clock=clock)
        key = add_key(admin, scopes=EVERY_SCOPE)
        model.history.append({})  # the key's revision; keys are no part of the model
        read: dict[tuple[str, int], Any] = {}  # what somebody may have read, by its ETag
        for step in steps:
            take(step, admin, clock, model)
            found = documents(admin)
            del found[Ref("key", key.key_id)]
            assert found == model.documents
            assert admin.state.revision == store.revision() == len(model.history) - 1
            for name in ("default", *admin.state.tenants):
                said = admin.state.stored_policy(name).model_dump()
                assert said == read.setdefault(
                    (name, admin.state.revision_of(Ref("policy", name))), said
                )
        for revision, wanted in enumerate(model.history):
            assert admin.bodies_at(revision) == (store.revision(), wanted)
        assert Administration(store, Policy(), clock=clock).state == admin.state
