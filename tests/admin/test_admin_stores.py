"""What every store does: documents, commits on top of what was seen, and the log of them."""

from collections.abc import Callable

import pytest
from admin_support import ENTRY

from spin_server.admin.store.interface import Change, Document, Entry, Ref, StaleError, Store

A, B, KEY = Ref("tenant", "a"), Ref("policy", "a"), Ref("key", "key-1")


def test_store_that_is_new_is_empty(any_store: Store) -> None:
    assert any_store.revision() == 0
    assert any_store.snapshot().revision == 0
    assert any_store.snapshot().documents == {}
    assert any_store.log(before=None, limit=10) == any_store.since(0) == []


def test_commit_is_in_the_snapshot_and_in_the_log(any_store: Store) -> None:
    entry = Entry("2026-01-01T00:00:00Z", "key-1", "PATCH /v1/x", "for ü, '\n' and \0", "request-1")
    first = [Change(A, None, {"x": [1, None, "é"]}), Change(B, None, {})]
    assert any_store.commit(0, first, ENTRY) == 1
    second = [Change(A, {"x": [1, None, "é"]}, {"x": 0.1}), Change(B, {}, None)]
    assert any_store.commit(1, second, entry) == 2
    assert any_store.revision() == 2
    assert any_store.snapshot().revision == 2
    assert any_store.snapshot().documents == {A: Document(2, {"x": 0.1})}
    assert any_store.since(1) == any_store.log(before=None, limit=1)
    (commit,) = any_store.since(1)
    assert (commit.revision, commit.entry) == (2, entry)
    assert sorted(commit.changes, key=lambda change: change.ref) == second[::-1]


def test_document_keeps_the_revision_that_wrote_it_last(any_store: Store) -> None:
    any_store.commit(0, [Change(A, None, {})], ENTRY)
    any_store.commit(1, [Change(B, None, {})], ENTRY)
    assert {ref: d.revision for ref, d in any_store.snapshot().documents.items()} == {A: 1, B: 2}


def test_log_is_read_in_pages_newest_first(any_store: Store) -> None:
    for base in range(5):
        any_store.commit(base, [Change(A, None, {"n": base})], ENTRY)
    assert [c.revision for c in any_store.log(before=None, limit=2)] == [5, 4]
    assert [c.revision for c in any_store.log(before=4, limit=9)] == [3, 2, 1]
    assert any_store.log(before=1, limit=9) == []
    assert [c.revision for c in any_store.since(2)] == [3, 4, 5]
    assert any_store.since(5) == []


def test_everything_is_there_when_the_store_is_opened_again(
    open_any: Callable[[], Store],
) -> None:
    first = open_any()
    first.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    snapshot, log = first.snapshot(), first.since(0)
    first.close()
    again = open_any()
    assert (again.snapshot(), again.since(0)) == (snapshot, log)


@pytest.mark.parametrize("base", [0, 2, -1])
def test_commit_on_another_revision_writes_nothing(any_store: Store, base: int) -> None:
    any_store.commit(0, [Change(A, None, {"x": 1})], ENTRY)
    before = any_store.snapshot(), any_store.since(0)
    with pytest.raises(StaleError, match=rf"expected revision {base}, got 1"):
        any_store.commit(base, [Change(B, None, {})], ENTRY)
    assert (any_store.snapshot(), any_store.since(0)) == before
    assert any_store.commit(1, [Change(B, None, {})], ENTRY) == 2


def test_commit_that_fails_half_way_writes_nothing(any_store: Store) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        any_store.commit(0, [Change(A, None, {}), Change(B, None, {"x": float("nan")})], ENTRY)
    assert (any_store.revision(), any_store.snapshot().documents, any_store.since(0)) == (0, {}, [])
    assert any_store.commit(0, [Change(A, None, {})], ENTRY) == 1
