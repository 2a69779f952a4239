"""Who may choose a policy."""

from types import SimpleNamespace
from typing import Any

import pytest

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.errors import InputError


def gate(*, allow: bool) -> PolicyGate:
    named = {"gentle": PolicySettings(sparsity="0.2"), "harsh": PolicySettings(sparsity="0.6")}
    return PolicyGate(SpinSettings(policies=named, allow_request_policy=allow))


def test_request_without_a_policy_runs_with_the_default() -> None:
    assert gate(allow=False).admit(None, "r") == {"spin_policy": 0}
    assert gate(allow=True).admit({"other": 1}, "r") == {"other": 1, "spin_policy": 0}


@pytest.mark.parametrize(("name", "number"), [("default", 0), ("gentle", 1), ("harsh", 2)])
def test_named_policy_is_turned_into_its_id_where_allowed(name: str, number: int) -> None:
    sent = {"spin_policy": name}
    assert gate(allow=True).admit(sent, "r") == {"spin_policy": number}
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
        gate(allow=allow).admit(sent, "r")
    assert message in str(caught.value)


def rows(chosen: PolicyGate, name: str | None, count: int = 4000) -> list[int]:
    sent = None if name is None else {"spin_policy": name}
    return [chosen.admit(sent, f"cmpl-{n}")["spin_policy"] for n in range(count)]


@pytest.mark.parametrize("percent", [1, 10, 50, 99])
def test_share_of_a_policys_requests_runs_with_its_canary(percent: int) -> None:
    chosen = gate(allow=True)
    chosen.name_rows({"acme": 5, "other": 6}, {"acme": (7, percent), "default": (8, percent)})
    for name, row, canary in (("acme", 5, 7), (None, 0, 8), ("default", 0, 8)):
        found = rows(chosen, name)
        assert set(found) == {row, canary}
        # Five standard deviations of a binomial draw.
        spread = 5 * (percent * (100 - percent) / 4000) ** 0.5
        assert found.count(canary) / 40 == pytest.approx(percent, abs=spread)
        assert rows(chosen, name) == found
    assert set(rows(chosen, "other")) == {6}
    # The same requests are not everybody's canary.
    agreed = [a == 7 for a in rows(chosen, "acme")], [d == 8 for d in rows(chosen, None)]
    assert agreed[0] != agreed[1]


def test_canary_grows_by_further_requests_and_ends() -> None:
    chosen = gate(allow=True)
    tried: set[int] = set()
    for percent in (5, 20, 60):
        chosen.name_rows({"acme": 5}, {"acme": (7, percent)})
        found = {n for n, row in enumerate(rows(chosen, "acme")) if row == 7}
        assert tried < found
        tried = found
    chosen.name_rows({"acme": 5}, {})
    assert set(rows(chosen, "acme")) == {5}


def test_side_cannot_be_worked_out_from_the_requests_id() -> None:
    found = []
    for chosen in (gate(allow=True), gate(allow=True)):
        chosen.name_rows({"acme": 5}, {"acme": (7, 50)})
        found.append(rows(chosen, "acme", 200))
    assert found[0] != found[1]
    assert chosen.admit({"spin_policy": "acme"}, "\ud800")["spin_policy"] in (5, 7)


def test_nobody_asks_for_a_canary_by_name() -> None:
    chosen = gate(allow=True)
    chosen.name_rows({"acme": 5}, {"acme": (7, 50)})
    with pytest.raises(InputError, match="expected one of default, gentle, harsh or a tenant"):
        chosen.admit({"spin_policy": "acme/canary"}, "r")


@pytest.mark.parametrize("by_name", [False, True])
def test_guard_draws_by_the_requests_own_id(by_name: bool) -> None:
    seen: list[int] = []

    class Client:
        def generate(self, prompt: str, sampling_params: Any, request_id: str, **_: Any) -> None:
            seen.append(sampling_params.extra_args["spin_policy"])

    chosen, client = gate(allow=False), Client()
    chosen.name_rows({}, {"default": (3, 50)})
    chosen.guard(client)
    for n in range(200):
        given = SimpleNamespace(extra_args=None)
        if by_name:
            client.generate("x", given, request_id=f"cmpl-{n}")
        else:
            client.generate("x", given, f"cmpl-{n}")
    assert seen == rows(chosen, None, 200)
    assert set(seen) == {0, 3}
