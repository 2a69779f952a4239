"""Nobody gets in without a valid key, or further than his key goes."""

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from admin_support import EVERY_SCOPE, Clock, add_key, add_tenant, do
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spin_server.admin.access import Principal, authenticate
from spin_server.admin.administration import Administration
from spin_server.admin.documents import Scope
from spin_server.admin.errors import ForbiddenError, UnauthorizedError
from spin_server.admin.first_key import KeyFile
from spin_server.admin.operations import NewKey, hash_key, revoke_key, rotate_key

SCOPES = st.frozensets(st.sampled_from(EVERY_SCOPE))
TENANTS = st.sampled_from([None, "a", "b"])


def enter(admin: Administration, authorization: str | None) -> Principal:
    return authenticate(admin.state, authorization, admin.clock())


def refusal(admin: Administration, authorization: str | None) -> str:
    with pytest.raises(UnauthorizedError) as caught:
        enter(admin, authorization)
    assert caught.value.status == 401
    return str(caught.value)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_caller_with_a_key_is_known(admin: Administration, scheme: str) -> None:
    add_tenant(admin, "a")
    key = add_key(admin, "a", ["read", "write"])
    found = enter(admin, f"{scheme} {key.secret}")
    assert found == Principal(key.key_id, "a", frozenset({"read", "write"}))


@pytest.mark.parametrize(
    "form",
    [
        None,
        *(
            "",
            " ",
            "Bearer",
            "Bearer ",
            "Bearer  ",
            "{secret}",
            "Basic {secret}",
            " Bearer {secret}",
        ),
        *("Bearer{secret}", "Bearer:{secret}", "Token {secret}", "Bearer " + 201 * "x"),
    ],
)
def test_header_that_is_malformed_is_refused(admin: Administration, form: str | None) -> None:
    key = add_key(admin)
    header = None if form is None else form.format(secret=key.secret)
    assert refusal(admin, header) == "expected the header Authorization: Bearer KEY"


def test_key_that_is_almost_right_is_refused(admin: Administration) -> None:
    key = add_key(admin)
    document = admin.state.key(key.key_id)
    assert document is not None
    for wrong in (
        key.secret[:-1],
        key.secret + "x",
        key.secret.swapcase(),
        key.secret.removeprefix("spin_"),
        key.key_id,
        document.sha256,
        document.prefix,
        f"{key.secret} {key.secret}",
        NewKey.draw().secret,
    ):
        assert (
            refusal(admin, f"Bearer {wrong}")
            == "expected a key that is valid, got one that is unknown, revoked or expired"
        )


def test_key_is_refused_from_its_end_on_as_if_unknown(admin: Administration, clock: Clock) -> None:
    key = add_key(admin, lifetime=60)
    clock.advance(59.9)
    assert enter(admin, f"Bearer {key.secret}").key_id == key.key_id
    clock.advance(0.1)
    expired = refusal(admin, f"Bearer {key.secret}")
    assert expired == refusal(admin, f"Bearer {NewKey.draw().secret}")


def test_key_is_refused_once_another_replica_revoked_it(
    admin: Administration, open_admin: Callable[[], Administration]
) -> None:
    key, other = add_key(admin), open_admin()
    assert enter(other, f"Bearer {key.secret}").key_id == key.key_id
    do(admin, revoke_key(key.key_id, "*"))
    other.refresh()
    assert refusal(other, f"Bearer {key.secret}") == refusal(admin, f"Bearer {key.secret}")


# The fixture is only read from.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.text(st.characters(max_codepoint=255)), bearer=st.booleans())
def test_any_other_header_is_refused(admin: Administration, header: str, bearer: bool) -> None:
    assert refusal(admin, "Bearer " + header if bearer else header)


@given(scopes=SCOPES, bound=TENANTS, scope=st.sampled_from(EVERY_SCOPE), tenant=TENANTS)
def test_caller_may_do_what_his_scopes_say_for_his_tenant(
    scopes: frozenset[Scope], bound: str | None, scope: Scope, tenant: str | None
) -> None:
    principal = Principal("key-1", bound, scopes)
    if scope in scopes and bound in (None, tenant):
        principal.require(scope, tenant)
    else:
        with pytest.raises(ForbiddenError) as caught:
            principal.require(scope, tenant)
        assert caught.value.status == 403


def test_refusal_names_the_scope_or_the_tenant() -> None:
    principal = Principal("key-1", "a", frozenset({"read"}))
    with pytest.raises(ForbiddenError, match="may not write: expected the scope 'write'"):
        principal.require("write", "a")
    with pytest.raises(ForbiddenError, match="bound to the tenant 'a'"):
        principal.require("read", "b")
    with pytest.raises(ForbiddenError, match="bound to the tenant 'a'"):
        principal.require("read")


@given(scopes=SCOPES, bound=TENANTS, granted=SCOPES, tenant=TENANTS)
def test_nobody_grants_more_than_he_has(
    scopes: frozenset[Scope], bound: str | None, granted: frozenset[Scope], tenant: str | None
) -> None:
    giver = Principal("key-1", bound, scopes)
    try:
        giver.require_grantable(set(granted), tenant)
    except ForbiddenError:
        assert "keys" not in scopes or not granted <= scopes or bound not in (None, tenant)
    else:
        # Whatever the new key allows, the giver's allows.
        taker = Principal("key-2", tenant, granted)
        assert "keys" in scopes
        for scope in taker.scopes:
            giver.require(scope, taker.tenant)


def test_grant_beyond_the_callers_scopes_names_them() -> None:
    giver = Principal("key-1", None, frozenset({"keys", "read"}))
    giver.require_grantable({"read", "keys"}, "a")
    with pytest.raises(ForbiddenError, match="cannot grant audit, write"):
        giver.require_grantable({"read", "write", "audit"}, None)


def test_secrets_have_256_random_bits() -> None:
    drawn = [NewKey.draw() for _ in range(64)]
    secrets = [base64.urlsafe_b64decode(key.secret.removeprefix("spin_") + "=") for key in drawn]
    assert {len(secret) for secret in secrets} == {32}
    numbers = [int.from_bytes(secret) for secret in secrets]
    for bit in range(256):
        assert {number >> bit & 1 for number in numbers} == {0, 1}
    assert len({key.key_id for key in drawn}) == 64


def test_secrets_are_nowhere_in_the_store(
    admin: Administration, path: Path, tmp_path: Path
) -> None:
    add_tenant(admin, "a")
    keys = [add_key(admin), add_key(admin, "a"), add_key(admin, lifetime=60)]
    for n in (0, 1):
        keys.append(NewKey.draw())
        do(admin, rotate_key(keys[n].key_id, keys[-1], 60, "*", now=admin.clock()))
    do(admin, revoke_key(keys[0].key_id, "*"))
    assert not admin.bootstrap(KeyFile(tmp_path / "key"))
    kept = b""
    for _ in range(2):  # with the write-ahead log, and once it is worked in
        kept += b"".join(file.read_bytes() for file in sorted(path.parent.glob("admin.db*")))
        admin.store.close()
    for key in keys:
        assert hash_key(key.secret).encode() in kept  # so what is stored can be found
        for part in (key.secret, key.secret.removeprefix("spin_"), key.secret[12:]):
            assert part.encode() not in kept
