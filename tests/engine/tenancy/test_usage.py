"""What each tenant used, as metrics."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from spin_server.engine.spin.metrics import SpinCollector
from spin_server.engine.spin.settings import SpinSettings
from spin_server.engine.tenancy.usage import TenantUsage

DRAWN = "0123456789abcdef01234567"


def ended(request_id: str | None, generated: int = 11, seconds: float = 0.012, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "request_id": request_id,
            "finish_reason": "length",
            "num_prompt_tokens": 100,
            "num_cached_tokens": 64,
            "num_generation_tokens": generated,
            "mean_time_per_output_token": seconds,
            **more,
        }
    )


class Usage:
    def __init__(self, *tenants: str) -> None:
        self.collector = SpinCollector("m", SpinSettings(), {})
        self.usage = TenantUsage(self.collector)
        self.registry = CollectorRegistry()
        self.registry.register(self.usage)
        self.name(*tenants)

    def name(self, *tenants: str) -> None:
        self.collector.name_rows({name: row for row, name in enumerate(tenants, start=1)}, 1)

    def record(self, *requests: Any) -> None:
        self.usage.record(None, SimpleNamespace(finished_requests=list(requests)))

    def value(self, name: str, tenant: str, **labels: str) -> float | None:
        base = {"model_name": "m", "engine": "0", "tenant": tenant}
        return self.registry.get_sample_value(name, {**base, **labels})

    def tenants(self) -> set[str]:
        return {s.labels["tenant"] for family in self.registry.collect() for s in family.samples}


def test_requests_are_counted_for_their_tenant_when_they_end() -> None:
    found = Usage("acme", "other")
    found.record(ended(f"acme.{DRAWN}"), ended(f"acme.{DRAWN}", 1, 9.0, finish_reason="stop"))
    found.record(ended(f"other.{DRAWN}", seconds=0.05), ended(f"default.{DRAWN}"))
    found.usage.record(None, None)  # a step without statistics
    assert found.value("spin_requests_total", "acme", finished_reason="length") == 1
    assert found.value("spin_requests_total", "acme", finished_reason="stop") == 1
    for name, wanted in (("prompt", 200), ("cached_prompt", 128), ("generation", 12)):
        assert found.value(f"spin_{name}_tokens_total", "acme") == wanted
    latency = "spin_request_time_per_output_token_seconds"
    assert found.value(f"{latency}_count", "acme") == 1  # one token has no time between tokens
    assert found.value(f"{latency}_sum", "acme") == 0.012
    buckets = [found.value(f"{latency}_bucket", "acme", le=le) for le in ("0.01", "0.0125", "+Inf")]
    assert buckets == [0, 1, 1]
    assert found.value(f"{latency}_bucket", "other", le="0.05") == 1
    assert found.value("spin_requests_total", "default", finished_reason="length") == 1


def test_labels_are_names_of_tenants_only() -> None:
    found = Usage("acme")
    for request_id in ("cmpl-1", "cmpl-acme.1", "acme", None, "acme.x", ""):
        found.record(ended(request_id))
    assert found.value("spin_requests_total", "default", finished_reason="length") == 6
    found.record(ended(f"made-up.{DRAWN}"))
    assert found.value("spin_requests_total", "_other", finished_reason="length") == 1
    assert found.tenants() == {"default", "_other"}


def test_labels_are_few_and_nothing_is_lost() -> None:
    names = [f"t{number:03}" for number in range(100)]
    found = Usage(*names)
    for name in names:
        found.record(ended(f"{name}.{DRAWN}"))
    assert len(found.tenants()) == 65  # with the default policy's, and all others together
    assert found.value("spin_generation_tokens_total", "_other") == 11 * 37
    found.name(*names[1:])  # the first one is deleted
    assert found.value("spin_generation_tokens_total", "t000") is None
    assert found.value("spin_generation_tokens_total", "_other") == 11 * 38


def test_what_a_client_leaves_is_counted_as_far_as_it_came() -> None:
    found, left = Usage("acme"), []

    def state(name: str, generated: int) -> Any:
        stats = SimpleNamespace(num_generation_tokens=generated)
        base = {"external_req_id": f"{name}.{DRAWN}", "prompt_len": 100, "num_cached_tokens": 64}
        return SimpleNamespace(**base, is_prefilling=generated == 0, stats=stats)

    def abort(request_ids: list[str], internal: bool) -> list[str]:
        left.append((request_ids, internal))
        return request_ids

    processor = SimpleNamespace(
        request_states={"0": state("acme", 7), "1": state("acme", 5), "2": state("default", 0)},
        external_req_ids={f"acme.{DRAWN}": ["0", "1"]},
        abort_requests=abort,
    )
    found.usage.watch(processor)
    assert processor.abort_requests(iter(["2", "a parent's"]), True) == ["2", "a parent's"]
    processor.abort_requests([f"acme.{DRAWN}", "unknown"], internal=False)
    assert left == [(["2", "a parent's"], True), ([f"acme.{DRAWN}", "unknown"], False)]
    assert found.value("spin_requests_total", "acme", finished_reason="abort") == 2
    for name, wanted in (("prompt", 200), ("cached_prompt", 128), ("generation", 12)):
        assert found.value(f"spin_{name}_tokens_total", "acme") == wanted
    assert found.value("spin_requests_total", "default", finished_reason="abort") == 1
    assert found.value("spin_prompt_tokens_total", "default") == 0
