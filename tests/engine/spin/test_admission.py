"""Who may choose a policy."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.engine.tenancy.callers import Caller, calling
from spin_server.engine.tenancy.limits import Limits
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
    ids = [f"cmpl-{n}" for n in range(count)]
    if name is None:
        return [chosen.admit(None, request_id)["spin_policy"] for request_id in ids]
    caller = Caller(None if name == "default" else name)
    return [chosen.admit_caller(caller, None, i)["spin_policy"] for i in ids]


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
    assert chosen.admit_caller(Caller("acme"), None, "\ud800")["spin_policy"] in (5, 7)


@pytest.mark.parametrize("name", ["acme", "acme/canary", "default/canary"])
def test_nobody_asks_for_a_tenants_policy_or_a_canary_by_name(name: str) -> None:
    chosen = gate(allow=True)
    chosen.name_rows({"acme": 5}, {"acme": (7, 50)})
    with pytest.raises(InputError, match=r"expected one of default, gentle, harsh, got"):
        chosen.admit({"spin_policy": name}, "r")


@pytest.mark.parametrize("by_name", [False, True])
def test_guard_draws_by_the_requests_own_id(by_name: bool) -> None:
    seen: list[int] = []

    class Client:
        def generate(self, prompt: str, sampling_params: Any, request_id: str, **_: Any) -> None:
            seen.append(sampling_params.extra_args["spin_policy"])

        encode = generate
        output_processor = None

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


# with tenants


class Keys:
    def __init__(self) -> None:
        self.tenants = True

    def configured(self) -> bool:
        return self.tenants

    def caller(self, authorization: str | None) -> Caller:
        raise AssertionError("asked at the door, not here")


class Recorder:
    """Stands in for vLLM's engine client: keeps what reaches it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.params: Any = None
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids={})

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[int]:
        row, self.params = sampling_params.extra_args["spin_policy"], sampling_params
        self.seen.append({"prompt": prompt, "id": request_id, "priority": priority, "row": row})
        return self.tokens()

    async def tokens(self) -> AsyncIterator[int]:
        yield 1
        yield 2

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *, priority: int = 0
    ) -> None:
        self.seen.append({"prompt": prompt, "id": request_id, "priority": priority})


@pytest.fixture
def guarded() -> tuple[PolicyGate, Recorder, Keys]:
    chosen, client, keys = gate(allow=True), Recorder(), Keys()
    chosen.name_rows({"acme": 5, "other": 6, "gentle": 9}, {})
    chosen.ask(keys)
    chosen.guard(client)
    return chosen, client, keys


def rendered(**more: Any) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": [1, 2], **more}


def params(extra: dict[str, Any] | None = None, **more: Any) -> Any:
    return SimpleNamespace(**{"extra_args": extra, "n": 1, "max_tokens": 16, **more})


def test_caller_decides_row_salt_priority_and_id(
    guarded: tuple[PolicyGate, Recorder, Keys],
) -> None:
    _, client, _ = guarded
    given = rendered(cache_salt="other's")
    for tenant in ("acme", "other", None, "acme"):
        with calling(Caller(tenant)):
            client.generate(given, params({"more": 1}), request_id="mine", priority=-9)
            client.encode(given, params(), "mine", priority=-9)
    assert [seen["row"] for seen in client.seen[::2]] == [5, 6, 0, 5]
    salts = [seen["prompt"]["cache_salt"] for seen in client.seen]
    assert salts[::2] == salts[1::2]
    assert salts[0] == salts[6]
    assert len(set(salts)) == 3
    assert "other's" not in salts
    assert {seen["priority"] for seen in client.seen} == {0}
    ids = [seen["id"] for seen in client.seen]
    assert len(set(ids)) == 8
    assert [i.split(".")[0] for i in ids[::2]] == ["acme", "other", "default", "acme"]
    assert given["cache_salt"] == "other's", "the client's own prompt is left alone"


@pytest.mark.parametrize(
    "sent", [{"spin_policy": "other"}, {"spin_policy": 6}, {"spin_policy": None}, {"spin_x": {}}]
)
def test_caller_sends_nothing_under_our_names(
    guarded: tuple[PolicyGate, Recorder, Keys], sent: dict[str, Any]
) -> None:
    _, client, _ = guarded
    with calling(Caller("acme")), pytest.raises(InputError, match="the key decides the policy"):
        client.generate(rendered(), params(sent), "r")
    assert client.seen == []


def test_tenant_without_a_row_is_refused_and_gets_no_policy_of_the_launch() -> None:
    chosen, client = gate(allow=True), Recorder()
    chosen.ask(Keys())
    chosen.guard(client)
    for tenant in ("gentle", "default", "nobody", ""):
        with calling(Caller(tenant)), pytest.raises(InputError, match="has a row for"):
            client.generate(rendered(), params(), "r")


def test_request_that_came_by_another_door_is_refused(
    guarded: tuple[PolicyGate, Recorder, Keys],
) -> None:
    _, client, keys = guarded
    with pytest.raises(InputError, match="expected one with a key, since there are tenants"):
        client.generate(rendered(), params(), "r")
    with pytest.raises(InputError, match="expected one with a key"):
        client.encode(rendered(), params(), "r")
    with (
        calling(Caller("acme")),
        pytest.raises(InputError, match="prompt: expected a rendered one"),
    ):
        client.generate("text", params(), "r")
    keys.tenants = False
    client.generate("text", params({"spin_policy": "harsh"}), "r", priority=3)
    assert client.seen == [{"prompt": "text", "id": "r", "priority": 3, "row": 2}]


def test_callers_canary_runs_in_its_row_and_shares_his_prefixes_by_class() -> None:
    chosen, client = gate(allow=False), Recorder()
    chosen.name_rows({"acme": 5}, {"acme": (7, 50)})
    chosen.ask(Keys())
    chosen.guard(client)
    with calling(Caller("acme")):
        for _ in range(200):
            client.generate(rendered(), params(), "r")
    assert {seen["row"] for seen in client.seen} == {5, 7}
    assert len({seen["prompt"]["cache_salt"] for seen in client.seen}) == 1


# with limits


def limited(**limits: int) -> tuple[Recorder, Caller]:
    chosen, client = gate(allow=False), Recorder()
    chosen.name_rows({"acme": 5, "other": 6}, {})
    chosen.ask(Keys())
    chosen.guard(client)
    return client, Caller("acme", Limits(**limits))


def too_many(client: Recorder, prompt: dict[str, Any], given: Any = None) -> str:
    with pytest.raises(GracefulHTTPError) as refused:
        client.generate(prompt, given or params(), "r")
    assert refused.value.http_status == 429
    return str(refused.value)


async def drain(generator: AsyncIterator[int]) -> list[int]:
    return [token async for token in generator]


def test_request_counts_until_its_generator_is_gone() -> None:
    client, caller = limited(concurrent_requests=2)
    with calling(caller):
        first = client.generate(rendered(), params(), "r")
        second = client.generate(rendered(), params(), "r")
        assert "2 of 2 requests of the tenant are open" in too_many(client, rendered())
        with calling(Caller("other", Limits(concurrent_requests=2))):
            client.generate(rendered(), params(), "r")  # others have their own
        assert asyncio.run(drain(first)) == [1, 2]  # the generator is vLLM's own
        too_many(client, rendered())  # its holder may still be writing the answer
        del first
        third = client.generate(rendered(), params(), "r")
        too_many(client, rendered())
        del second, third  # never begun: the client went away
        two = client.generate(rendered(), params(n=2), "r")
        too_many(client, rendered())
        del two
        with pytest.raises(InputError, match="at most 2 sequences of a tenant, got 3"):
            client.generate(rendered(), params(n=3), "r")
    assert client.seen[-1]["id"].startswith("acme.")


def test_prompts_count_until_their_first_token() -> None:
    client, caller = limited(queued_tokens=10)
    long = rendered(prompt_token_ids=list(range(6)))
    with calling(caller):
        held = client.generate(long, params(), "r")
        assert "6 of 10 prompt tokens of the tenant are queued" in too_many(client, long)
        small = client.generate(rendered(), params(), "r")
        request = client.seen[0]["id"]
        processor = client.output_processor
        processor.external_req_ids[request] = ["internal"]
        state = SimpleNamespace(prompt_len=6, is_prefilling=True, external_req_id=request)
        processor.request_states["internal"] = state
        too_many(client, long)
        state.is_prefilling = False  # the first token is there
        held_too = client.generate(long, params(), "r")
        too_many(client, long)
        processor.request_states["another"] = SimpleNamespace(
            prompt_len=1000, is_prefilling=True, external_req_id="acme-too." + "0" * 24
        )
        del held_too
        client.generate(long, params(), "r")
        with pytest.raises(InputError, match="at most 10 tokens queued by a tenant, got 11"):
            client.generate(rendered(prompt_token_ids=list(range(11))), params(), "r")
    del held, small


@pytest.mark.parametrize(("asked", "given"), [(16, 8), (None, 8), (3, 3)])
def test_answer_ends_where_the_tenants_context_does(asked: int | None, given: int) -> None:
    client, caller = limited(context_tokens=10)
    sent = params(max_tokens=asked)
    with calling(caller):
        client.generate(rendered(), sent, "r")
        assert (client.params.max_tokens, sent.max_tokens) == (given, asked)
        with pytest.raises(InputError, match="fewer than 10 tokens, the tenant's context, got 10"):
            client.generate(rendered(prompt_token_ids=list(range(10))), params(), "r")
