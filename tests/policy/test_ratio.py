from decimal import Decimal

import pytest

from spin_server.errors import InputError
from spin_server.policy.policy import Policy
from spin_server.policy.ratio import Ratio


@pytest.mark.parametrize(
    ("value", "billionths"),
    [
        ("0", 0),
        ("1", 10**9),
        ("1.000", 10**9),
        ("0.30", 300_000_000),
        (0.1, 100_000_000),  # a float means its shortest decimal, not its binary value
        (Decimal("0.123456789"), 123_456_789),
        ("1e-9", 1),
        (" 0.5 ", 500_000_000),
    ],
)
def test_decimal_is_read_exactly(value: str | float | Decimal, billionths: int) -> None:
    assert Ratio.parse("share", value).billionths == billionths


@pytest.mark.parametrize(
    "value",
    [
        *("", "x", "nan", "inf", "-0.1", "1.000000001", "1e-10", "0.1.2", "1e9"),
        *("0.3_0", "٠.٣", "1e-99999", "0.3" + "0" * 35 + "1"),
    ],
)
def test_what_is_no_share_is_refused(value: str) -> None:
    with pytest.raises(InputError, match="share: expected"):
        Ratio.parse("share", value)


def test_policy_refuses_unknown_exploration() -> None:
    with pytest.raises(InputError, match="exploration_policy: expected one of random, block_age"):
        Policy(exploration_policy="greedy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="probe_period: expected 0"):
        Policy(probe_period=-1)
