"""What a patch of a policy may hold, and that shares are kept exactly."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from admin_support import (
    do,
    sent,
)
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spin_server.admin.administration import Administration
from spin_server.admin.documents import PolicyPatch
from spin_server.admin.operations import (
    patch_policy,
)
from spin_server.policy.ratio import Ratio


def refused(text: str) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        PolicyPatch.model_validate_json(text)
    with pytest.raises(ValidationError):
        PolicyPatch.model_validate(json.loads(text))
    return [error["msg"] for error in caught.value.errors()]


@pytest.mark.parametrize("field", ["target_sparsity", "exploration_share", "ema_decay"])
@pytest.mark.parametrize(
    "value",
    [
        *("NaN", "Infinity", "-Infinity", '"NaN"', '"inf"', "true", "false", '""', '"x"', "[]"),
        *("-1e-9", "1.000000001", "2", "-1", "1e-10", "0.0000000001", '"0.1234567891"', "{}"),
        *('"1e-99999"', "1e400", "1" * 4000, '"0.3%"'),
    ],
)
def test_share_that_is_none_is_refused(field: str, value: str) -> None:
    assert refused(f'{{"{field}": {value}}}')


@pytest.mark.parametrize(
    "fields",
    [
        {"probe_period": True},
        {"probe_period": -1},
        {"probe_period": 2**31},
        {"probe_period": 1.5},
        {"probe_period": "8"},
        {"exploration_policy": "greedy"},
        {"exploration_policy": 1},
        {"budget": "global"},
        {"sparsity": 0.5},
        {"Target_Sparsity": 0.5},
        {"target_sparsity": 0.5, "surprise": None},
        [],
        None,
    ],
)
def test_patch_with_something_else_is_refused(fields: Any) -> None:
    assert refused(json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"max_miss_rate": 0.1}, "max_miss_rate: guard rails do not exist in this release"),
        ({"min_sparsity": None}, "min_sparsity: guard rails do not exist in this release"),
        ({"max_sparsity": 1}, "max_sparsity: guard rails do not exist in this release"),
        ({"guard_rails": {}}, "guard_rails: guard rails do not exist in this release"),
        ({"canary": True}, "canary: expected ?canary_percent= beside the fields"),
        ({"canary_percent": 5}, "canary_percent: expected ?canary_percent= beside the fields"),
        ({"layer_budgets": []}, "layer_budgets: per-layer budgets do not exist in this release"),
        ({"budget": "per_layer"}, "budget: per-layer budgets do not exist in this release"),
    ],
)
def test_feature_that_does_not_exist_is_named(fields: dict[str, Any], line: str) -> None:
    assert refused(json.dumps({"target_sparsity": 0.5, **fields})) == [f"Value error, {line}"]


@pytest.mark.parametrize(
    ("text", "billionths"),
    [
        ("1e-9", 1),
        ('"1e-9"', 1),
        ("0.000000001", 1),
        ('"0.3"', 300_000_000),
        ("0.3", 300_000_000),
        ("0.1234567890", 123_456_789),
        ("0.999999999", 999_999_999),
        ("0", 0),
        ("-0.0", 0),
        ("1", 10**9),
    ],
)
def test_share_survives_exactly(
    admin: Administration,
    open_admin: Callable[[], Administration],
    text: str,
    billionths: int,
) -> None:
    changes = PolicyPatch.model_validate_json(f'{{"target_sparsity": {text}}}').changes()
    do(admin, patch_policy("default", changes, "*", now=admin.clock()))
    for found in (admin, open_admin()):
        assert found.state.effective("default").policy.sparsity.billionths == billionths


@given(billionths=st.integers(0, 10**9), as_text=st.booleans())
def test_every_share_is_stored_exactly(billionths: int, as_text: bool) -> None:
    value: str | float = f"{billionths / 10**9:.9f}"
    if not as_text:
        value = float(value)
    stored = sent(ema_decay=value)["ema_decay"]
    assert Ratio.parse("ema_decay", stored).billionths == billionths
    assert sent(ema_decay=stored)["ema_decay"] == stored


# A model: plain dictionaries
