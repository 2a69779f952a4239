"""Who may choose a policy."""

from typing import Any

import pytest

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.errors import InputError


def gate(*, allow: bool) -> PolicyGate:
    named = {"gentle": PolicySettings(sparsity="0.2"), "harsh": PolicySettings(sparsity="0.6")}
    return PolicyGate(SpinSettings(policies=named, allow_request_policy=allow))


def test_request_without_a_policy_runs_with_the_default() -> None:
    assert gate(allow=False).admit(None) == {"spin_policy": 0}
    assert gate(allow=True).admit({"other": 1}) == {"other": 1, "spin_policy": 0}


@pytest.mark.parametrize(("name", "number"), [("default", 0), ("gentle", 1), ("harsh", 2)])
def test_named_policy_is_turned_into_its_id_where_allowed(name: str, number: int) -> None:
    sent = {"spin_policy": name}
    assert gate(allow=True).admit(sent) == {"spin_policy": number}
    assert sent == {"spin_policy": name}, "the client's own arguments are left alone"


@pytest.mark.parametrize(
    ("allow", "sent", "message"),
    [
        (False, {"spin_policy": "gentle"}, "does not let clients choose"),
        (False, {"spin_policy": 0}, "does not let clients choose"),
        (True, {"spin_policy": "mild"}, "expected one of default, gentle, harsh, got 'mild'"),
        (True, {"spin_policy": 2}, "expected one of default, gentle, harsh, got 2"),
        (True, {"spin_policy": ["gentle"]}, "expected one of default, gentle, harsh"),
        (True, {"spin_sparsity": 0.9}, "vllm_xargs.spin_sparsity: expected no argument"),
    ],
)
def test_what_a_client_may_not_send_is_refused(allow: bool, sent: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        gate(allow=allow).admit(sent)
    assert message in str(caught.value)
