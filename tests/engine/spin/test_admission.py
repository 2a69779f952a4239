"""Who may choose a policy."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError

from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.engine.tenancy.callers import Caller, UnknownCallerError, Visit, visiting
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
        (True, {"kv_transfer_params": "x"}, "kv_transfer_params: expected an object, got 'x'"),
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
    return [chosen.admit_caller(Visit(), caller, None, i)["spin_policy"] for i in ids]


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
    assert chosen.admit_caller(Visit(), Caller("acme"), None, "\ud800")["spin_policy"] in (5, 7)


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
        output_processor = SimpleNamespace(add_request=None)

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


KNOWN: dict[str | None, Caller] = {}  # by header


def visit_of(caller: Caller) -> Visit:
    KNOWN[repr(caller)] = caller
    return Visit(repr(caller))


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    with visiting(visit_of(caller)):
        yield


class Keys:
    def __init__(self) -> None:
        self.tenants = True

    def configured(self) -> bool:
        return self.tenants

    def caller(self, authorization: str | None) -> Caller:
        if authorization not in KNOWN:
            raise UnknownCallerError("no such key")
        return KNOWN[authorization]


class Recorder:
    """Stands in for vLLM's engine client: keeps what reaches it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.params: Any = None
        self.added: list[str] = []
        self.output_processor = SimpleNamespace(
            request_states={},
            external_req_ids={},
            add_request=lambda request: self.added.append(request.external_req_id),
        )

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
        with calling(Caller(tenant)), pytest.raises(GracefulHTTPError) as refused:
            client.generate(rendered(), params(), "r")
        assert refused.value.http_status == 503
        assert "has no row among the engine's policies (--spin-capacity)" in str(refused.value)


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


def opened(client: Recorder, caller: Caller, prompt: Any = None, **more: Any) -> tuple[Visit, Any]:
    """Send one HTTP request that has one prompt."""
    visit = visit_of(caller)
    with visiting(visit):
        return visit, client.generate(prompt or rendered(), params(**more), "r")


def too_many(client: Recorder, caller: Caller, prompt: Any = None) -> str:
    with pytest.raises(GracefulHTTPError) as refused:
        opened(client, caller, prompt)
    assert refused.value.http_status == 429
    return str(refused.value)


async def drain(generator: AsyncIterator[int]) -> list[int]:
    return [token async for token in generator]


def test_request_counts_until_its_generator_is_gone() -> None:
    client, caller = limited(concurrent_requests=2)
    _, first = opened(client, caller)
    _, second = opened(client, caller)
    assert "2 of 2 sequences of the tenant are open" in too_many(client, caller)
    opened(client, Caller("other", Limits(concurrent_requests=2)))  # others have their own
    assert asyncio.run(drain(first)) == [1, 2]  # the generator is vLLM's own
    too_many(client, caller)  # its holder may still be writing the answer
    del first
    _, third = opened(client, caller)
    too_many(client, caller)
    del second, third  # never begun
    _, two = opened(client, caller, n=2)
    too_many(client, caller)
    del two
    opened(client, caller)
    assert client.seen[-1]["id"].startswith("acme.")


def test_request_counts_no_longer_than_its_http_request_is_open() -> None:
    client, caller = limited(concurrent_requests=2)
    gc.disable()  # a generator within a cycle waits for it
    try:
        visit, generator = opened(client, caller, n=2)
        cycle: list[Any] = [generator]
        cycle.append(cycle)
        del generator, cycle
        too_many(client, caller)
        visit.end()
        opened(client, caller, n=2)
    finally:
        gc.enable()


def test_what_never_fits_into_one_http_request_is_the_clients_mistake() -> None:
    client, caller = limited(concurrent_requests=2, queued_tokens=10)
    with pytest.raises(InputError, match="at most 2 sequences of a tenant open at once, got 3"):
        opened(client, caller, n=3)
    with visiting(visit_of(caller)):  # a list of prompts
        held = [client.generate(rendered(), params(), "r") for _ in range(2)]
        with pytest.raises(InputError, match="at most 2 sequences"):
            client.generate(rendered(), params(), "r")
    del held
    six = rendered(prompt_token_ids=list(range(6)))
    with visiting(visit_of(caller)):
        first = client.generate(six, params(), "r")
        with pytest.raises(InputError, match=r"at most 10 prompt tokens of .* queued .*, got 12"):
            client.generate(six, params(), "r")
    del first
    with pytest.raises(InputError, match=r"at most 10 prompt tokens .*, got 11"):
        opened(client, caller, rendered(prompt_token_ids=list(range(11))))


def test_prompts_count_until_their_first_token_once_whatever_n_is() -> None:
    client, caller = limited(queued_tokens=10)
    long = rendered(prompt_token_ids=list(range(6)))
    _, held = opened(client, caller, long, n=2)
    assert "6 of 10 prompt tokens of the tenant are queued" in too_many(client, caller, long)
    _, small = opened(client, caller)
    processor, request = client.output_processor, client.seen[0]["id"]
    states = [SimpleNamespace(is_prefilling=True) for _ in range(2)]
    for external in (request, "of nobody's", request):  # one for each of n
        processor.add_request(SimpleNamespace(external_req_id=external))
    assert client.added == [request, "of nobody's", request]
    processor.external_req_ids[request] = ["0", "1"]
    processor.request_states |= {"0": states[0], "1": states[1]}
    assert "8 of 10 prompt tokens" in too_many(client, caller, long)
    states[0].is_prefilling = False
    too_many(client, caller, long)
    states[1].is_prefilling = False  # every sequence has its first token
    _, held_too = opened(client, caller, long)
    too_many(client, caller, long)
    del processor.external_req_ids[request]  # ended, and its answer is being written
    del held_too
    opened(client, caller, long)
    del held, small


def test_prompt_that_ended_unseen_is_queued_no_longer() -> None:
    client, caller = limited(queued_tokens=10)
    six = rendered(prompt_token_ids=list(range(6)))
    _, held = opened(client, caller, six)
    too_many(client, caller, six)
    client.output_processor.add_request(SimpleNamespace(external_req_id=client.seen[0]["id"]))
    opened(client, caller, six)  # it came and went while nobody looked
    del held


def test_key_that_is_over_when_the_body_has_come_is_refused() -> None:
    client, caller = limited(concurrent_requests=2)
    visit = visit_of(caller)
    visit.caller = KNOWN.pop(visit.authorization)
    with visiting(visit), pytest.raises(GracefulHTTPError, match="no such key") as refused:
        client.generate(rendered(), params(), "r")
    assert (refused.value.http_status, visit.refusal) == (401, refused.value)


def test_what_has_begun_goes_on_whatever_becomes_of_key_tenant_and_server(
    guarded: tuple[PolicyGate, Recorder, Keys],
) -> None:
    chosen, client, keys = guarded
    visit = visit_of(Caller("acme"))
    with visiting(visit):  # a beam search is a request for every token
        client.generate(rendered(), params(), "r")
        KNOWN.pop(visit.authorization)
        chosen.name_rows({"other": 6}, {})
        client.generate(rendered(), params(), "r")
    assert [seen["row"] for seen in client.seen] == [5, 5]
    keys.tenants = False
    with visiting(Visit()):
        client.generate("text", params(), "r")
        keys.tenants = True
        client.generate("text", params(), "r")
    assert [seen["row"] for seen in client.seen[2:]] == [0, 0]


def test_tenant_made_anew_finds_nothing_of_its_namesake(
    guarded: tuple[PolicyGate, Recorder, Keys],
) -> None:
    chosen, client, _ = guarded
    for caller in (Caller("acme", None, "one"), Caller("acme", None, "two")):
        opened(client, caller)
    chosen.name_rows({"other": 6}, {})
    chosen.name_rows({"acme": 7, "other": 6}, {})
    opened(client, Caller("acme", None, "two"))
    opened(client, Caller("acme", None, "two"))
    salts = [seen["prompt"]["cache_salt"] for seen in client.seen]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3]


@pytest.mark.parametrize(("asked", "given"), [(16, 8), (None, 8), (3, 3)])
def test_answer_ends_where_the_tenants_context_does(asked: int | None, given: int) -> None:
    client, caller = limited(context_tokens=10)
    sent = params(max_tokens=asked)
    with calling(caller):
        client.generate(rendered(), sent, "r")
        assert (client.params.max_tokens, sent.max_tokens) == (given, asked)
        with pytest.raises(InputError, match="fewer than 10 tokens, the tenant's context, got 10"):
            client.generate(rendered(prompt_token_ids=list(range(10))), params(), "r")
