"""All documents at one revision, and what follows from them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ValidationError

from spin_server.admin.documents import (
    DEFAULT,
    DOCUMENTS,
    Fields,
    KeyDocument,
    PolicyDocument,
    TenantDocument,
    moment,
    policy_of,
)
from spin_server.admin.store.interface import Change, Document, Ref, Snapshot, StoreError
from spin_server.policy.policy import Policy

logger = logging.getLogger(__name__)

_NOTHING_SET = PolicyDocument(fields={})


@dataclass(frozen=True, slots=True)
class Effective:
    """A policy as it is in force.

    Args:
        policy: all of it.
        fields: the same, field by field, as stored.
        sources: where each field comes from: `canary`, `tenant`, `default` (the stored default
            policy) or `launch` (the server's arguments, or their defaults).
    """

    policy: Policy
    fields: Fields
    sources: dict[str, str]


def check(ref: Ref, body: Mapping[str, Any]) -> BaseModel:
    """Read a stored document.

    Raises:
        StoreError: it is not what this release writes.
    """
    try:
        return DOCUMENTS[ref.kind].model_validate(body)
    except (KeyError, ValidationError) as error:
        raise StoreError(
            f"{ref.kind} {ref.name}: expected a document of this release, got {_in_one_line(error)}"
        ) from None


def _in_one_line(error: Exception) -> str:
    """Say what is wrong, without the values."""
    if not isinstance(error, ValidationError):
        return "another kind of document"
    found = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'/'.join(map(str, e['loc']))}: {e['msg']}" for e in found[:5])


@dataclass(frozen=True)
class State:
    """The documents of one revision, read and checked.

    Args:
        revision: the store's.
        documents: as they are stored.
        read: the same, as objects.
        launch: the default policy's fields as the server was started with.
    """

    revision: int
    documents: Mapping[Ref, Document]
    read: Mapping[Ref, BaseModel]
    launch: Fields

    @classmethod
    def of(cls, snapshot: Snapshot, launch: Fields) -> "State":
        """Read a snapshot.

        Raises:
            StoreError: a document is not what this release writes.
        """
        read = {ref: check(ref, document.body) for ref, document in snapshot.documents.items()}
        return cls(snapshot.revision, snapshot.documents, read, launch)

    def at(self, now: datetime) -> "State":
        """Get the state as it is in force: without what was set until a time that has passed."""
        if self.next_expiry is None or self.next_expiry > now:
            return self
        read = {
            ref: found.at(now) if isinstance(found, PolicyDocument) else found
            for ref, found in self.read.items()
        }
        return replace(self, read=read)

    def after(self, changes: Sequence[Change]) -> "State":
        """Get the state that a commit makes."""
        documents, read, revision = dict(self.documents), dict(self.read), self.revision + 1
        for change in changes:
            if change.after is None:
                documents.pop(change.ref, None)
                read.pop(change.ref, None)
            else:
                documents[change.ref] = Document(revision, change.after)
                read[change.ref] = check(change.ref, change.after)
        state = replace(self, revision=revision, documents=documents, read=read)
        state._inherit(self, changes)
        return state

    def _inherit(self, before: "State", changes: Sequence[Change]) -> None:
        """Take over what was worked out before and still holds."""
        worked_out, kinds = before.__dict__, {change.ref.kind for change in changes}
        for name, kind in (("tenants", "tenant"), ("keys", "key")):
            if name in worked_out and kind not in kinds:
                self.__dict__[name] = worked_out[name]
        if "key_ids" not in worked_out:
            return
        ids: dict[str, str] = worked_out["key_ids"]
        if "key" in kinds:
            ids = dict(ids)
            for change in changes:
                if change.ref.kind == "key" and change.before is not None:
                    ids.pop(change.before["sha256"], None)
            for change in changes:
                if change.ref.kind == "key" and change.after is not None:
                    ids[change.after["sha256"]] = change.ref.name
        self.__dict__["key_ids"] = ids

    def body(self, ref: Ref) -> dict[str, Any] | None:
        """Get a document as it is stored, if there is one."""
        document = self.documents.get(ref)
        return None if document is None else document.body

    def revision_of(self, ref: Ref) -> int:
        """Get the revision that wrote a document last; 0 if there is none.

        A tenant without a policy of its own has had that since it was made or written last: another
        tenant that takes its name later is not what somebody read.
        """
        document = self.documents.get(ref)
        if document is None and ref.kind == "policy":
            document = self.documents.get(Ref("tenant", ref.name))
        return 0 if document is None else document.revision

    def tenant(self, name: str) -> TenantDocument | None:
        """Get a tenant, if there is one."""
        found = self.read.get(Ref("tenant", name))
        assert found is None or isinstance(found, TenantDocument)
        return found

    def key(self, key_id: str) -> KeyDocument | None:
        """Get a key, if there is one."""
        found = self.read.get(Ref("key", key_id))
        assert found is None or isinstance(found, KeyDocument)
        return found

    @cached_property
    def tenants(self) -> list[str]:
        """Names of all tenants, sorted."""
        return sorted(ref.name for ref in self.documents if ref.kind == "tenant")

    @cached_property
    def tenants_without_policy(self) -> set[str]:
        """Names of the tenants whose policy is the default one."""
        return {name for name in self.tenants if not self.stored_policy(name).fields}

    @cached_property
    def keys(self) -> list[str]:
        """Ids of all keys, sorted."""
        return sorted(ref.name for ref in self.documents if ref.kind == "key")

    @cached_property
    def key_ids(self) -> dict[str, str]:
        """Ids of the keys by hash."""
        return {key.sha256: n for n in self.keys if (key := self.key(n)) is not None}

    def stored_policy(self, name: str) -> PolicyDocument:
        """Get what is set of a policy; nothing, if nothing is."""
        found = self.read.get(Ref("policy", name))
        assert found is None or isinstance(found, PolicyDocument)
        return _NOTHING_SET if found is None else found

    def effective(self, name: str, *, canary: bool = False) -> Effective:
        """Put a policy together: the tenant's fields, then the default's, then the launch's.

        Args:
            canary: as it is for the requests that try the canary's fields, if there is one.
        """
        layers = [("launch", self.launch), (DEFAULT, self.stored_policy(DEFAULT).fields)]
        if name != DEFAULT:
            layers.append(("tenant", self.stored_policy(name).fields))
        if canary and (tried := self.stored_policy(name).canary) is not None:
            layers.append(("canary", tried.fields))
        fields: Fields = {}
        sources: dict[str, str] = {}
        for source, given in layers:
            fields.update(given)
            sources.update(dict.fromkeys(given, source))
        return Effective(policy_of(fields), fields, sources)

    @cached_property
    def canaries(self) -> dict[str, int]:
        """Percent of the requests that try a canary, by the policy's name."""
        found = {
            ref.name: policy.canary.percent
            for ref, policy in self.read.items()
            if isinstance(policy, PolicyDocument) and policy.canary is not None
        }
        return dict(sorted(found.items()))

    @cached_property
    def next_expiry(self) -> datetime | None:
        """When the first policy goes back by itself, if one does."""
        times = [
            moment(found.expires.at)
            for found in self.read.values()
            if isinstance(found, PolicyDocument) and found.expires is not None
        ]
        return min(times, default=None)
