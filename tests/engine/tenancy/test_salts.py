"""Whose cached prefixes a request may find."""

from spin_server.engine.tenancy.salts import PrefixSalts
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio


def policy(sparsity: str) -> Policy:
    return Policy(sparsity=Ratio.parse("sparsity", sparsity))


EXACT, SPARSE, HARSH = policy("0"), policy("0.3"), policy("0.65")


def write(salts: PrefixSalts, rows: dict[int, Policy]) -> None:
    salts.before_write(rows)
    salts.after_write(rows)


def salts_of(**rows: Policy) -> tuple[PrefixSalts, dict[str, int]]:
    salts, owners = PrefixSalts({0: SPARSE}), {name: n for n, name in enumerate(rows, start=1)}
    write(salts, {owners[name]: given for name, given in rows.items()})
    salts.name_rows({row: name for name, row in owners.items()})
    return salts, owners


def test_tenants_and_classes_share_nothing_and_servers_do_not_agree() -> None:
    salts, rows = salts_of(acme=SPARSE, other=SPARSE, careful=EXACT, too=EXACT)
    found = [salts.salt(name, row) for name, row in rows.items()] + [salts.salt(None, 0)]
    assert len(set(found)) == 5
    again, _ = salts_of(acme=SPARSE, other=SPARSE, careful=EXACT, too=EXACT)
    assert not {again.salt(name, row) for name, row in rows.items()} & set(found)


def test_another_sparsity_keeps_the_prefixes() -> None:
    salts, rows = salts_of(acme=SPARSE)
    before = salts.salt("acme", rows["acme"])
    write(salts, {rows["acme"]: HARSH})
    assert salts.salt("acme", rows["acme"]) == before


def test_what_ran_while_exact_became_sparse_is_never_found_by_an_exact_one() -> None:
    salts, rows = salts_of(acme=EXACT, other=EXACT)
    row, others = rows["acme"], salts.salt("other", rows["other"])
    seen = {salts.salt("acme", row)}
    for _ in range(3):
        write(salts, {row: SPARSE})
        sparse = salts.salt("acme", row)
        write(salts, {row: EXACT})
        exact = salts.salt("acme", row)
        assert exact not in seen
        seen |= {sparse, exact}
    assert len(seen) == 1 + 1 + 3  # the sparse one stays the same
    assert salts.salt("other", rows["other"]) == others


def test_requests_that_begin_during_a_write_count_as_sparse() -> None:
    salts, rows = salts_of(acme=EXACT)
    row = rows["acme"]
    exact = salts.salt("acme", row)
    salts.before_write({row: SPARSE})
    sparse = salts.salt("acme", row)
    assert sparse != exact
    salts.before_write({row: EXACT})  # the write before was never acknowledged
    assert salts.salt("acme", row) == sparse
    salts.after_write({row: EXACT})
    assert salts.salt("acme", row) not in (exact, sparse)


def test_row_that_changes_hands_uses_up_its_former_owners_salt() -> None:
    salts, rows = salts_of(acme=EXACT)
    row = rows["acme"]
    before = salts.salt("acme", row)
    salts.name_rows({})  # acme is deleted, its requests go on
    write(salts, {row: SPARSE})  # the row is another's now
    salts.name_rows({row: "other"})
    write(salts, {9: EXACT})  # and acme is made again
    salts.name_rows({9: "acme"})
    assert salts.salt("acme", 9) != before
    assert salts.salt("other", row) not in (before, salts.salt("acme", 9))


def test_canary_that_skips_blocks_leaves_the_exact_ones_alone() -> None:
    salts, rows = salts_of(acme=EXACT)
    exact = salts.salt("acme", rows["acme"])
    write(salts, {7: SPARSE})
    salts.name_rows({7: "acme"})
    assert salts.salt("acme", 7) != exact == salts.salt("acme", rows["acme"])
