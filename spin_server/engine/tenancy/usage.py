"""What each tenant used, as metrics beside vLLM's own.

Counted once a request has ended, from what vLLM says of it then: nothing is done for a token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spin_server.engine.spin.metrics import OTHER, SpinCollector
from spin_server.engine.tenancy.request_ids import owner
from spin_server.policy.policy import DEFAULT

# Fine around the 10 to 20 ms that a large deployment is tuned for.
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.0175, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)
_BASE = ("model_name", "engine")


@dataclass(slots=True)
class _Used:
    requests: Counter[str] = field(default_factory=Counter)  # by how they ended
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    seconds: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    total_seconds: float = 0.0

    def add(self, other: "_Used") -> None:
        """Take over another's."""
        self.requests.update(other.requests)
        self.prompt += other.prompt
        self.cached += other.cached
        self.generated += other.generated
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds, strict=True)]
        self.total_seconds += other.total_seconds


class TenantUsage(Collector):
    """Counts what tenants used; one of vLLM's stat loggers, and a collector of metrics.

    Args:
        collector: of SPIN's metrics, which knows the labels.
    """

    def __init__(self, collector: SpinCollector) -> None:
        self._base, self._label = [collector.model_name, "0"], collector.label
        self._used: dict[str, _Used] = {DEFAULT: _Used()}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Count the requests that ended in a step.

        Source: vllm/v1/metrics/stats.py (IterationStats, FinishedRequestStats).
        """
        if iteration_stats is None:
            return
        for ended in iteration_stats.finished_requests:
            used = self._of(ended.request_id)
            used.requests[str(ended.finish_reason)] += 1
            used.prompt += ended.num_prompt_tokens
            used.cached += ended.num_cached_tokens
            used.generated += ended.num_generation_tokens
            if ended.num_generation_tokens > 1:
                seconds = ended.mean_time_per_output_token
                used.seconds[bisect_left(_SECONDS, seconds)] += 1
                used.total_seconds += seconds

    def watch(self, processor: Any) -> None:
        """Count what clients leave, too: vLLM counts no request that is aborted.

        Source: vllm/v1/engine/output_processor.py (abort_requests).
        """
        abort = processor.abort_requests

        def counted(request_ids: Iterable[str], internal: bool) -> Any:
            request_ids, known = list(request_ids), processor.external_req_ids
            found = request_ids if internal else [i for e in request_ids for i in known.get(e, ())]
            for state in filter(None, map(processor.request_states.get, found)):
                used = self._of(state.external_req_id)
                used.requests["abort"] += 1
                if not state.is_prefilling:
                    used.prompt += state.prompt_len
                    used.cached += state.num_cached_tokens
                    used.generated += state.stats.num_generation_tokens
            return abort(request_ids, internal)

        processor.abort_requests = counted

    def _of(self, request_id: str | None) -> _Used:
        return self._used.setdefault(self._label(owner(request_id)), _Used())

    def _settle(self) -> None:
        """Put together what tenants used that have no label of their own any more."""
        for label in [name for name in self._used if name != OTHER]:
            if self._label(label) != label:
                self._used.setdefault(OTHER, _Used()).add(self._used.pop(label))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        self._settle()
        labels = [*_BASE, "tenant"]
        requests = CounterMetricFamily(
            "spin_requests", "requests that have ended", labels=[*labels, "finished_reason"]
        )
        counters = {
            "prompt": CounterMetricFamily(
                "spin_prompt_tokens", "prompt tokens of requests that have ended", labels=labels
            ),
            "cached": CounterMetricFamily(
                "spin_cached_prompt_tokens",
                "of these, the ones that were found in the prefix cache",
                labels=labels,
            ),
            "generated": CounterMetricFamily(
                "spin_generation_tokens",
                "tokens generated for requests that have ended",
                labels=labels,
            ),
        }
        latency = HistogramMetricFamily(
            "spin_request_time_per_output_token_seconds",
            "mean time between the tokens of a request, by request",
            labels=labels,
        )
        bounds = [*map(str, _SECONDS), "+Inf"]
        for tenant, used in self._used.items():
            base = [*self._base, tenant]
            for reason, count in used.requests.items():
                requests.add_metric([*base, reason], count)
            for name, family in counters.items():
                family.add_metric(base, getattr(used, name))
            buckets = list(zip(bounds, accumulate(used.seconds), strict=True))
            latency.add_metric(base, buckets=buckets, sum_value=used.total_seconds)
        yield from (requests, *counters.values(), latency)

    # The rest of what vLLM's manager of stat loggers calls.

    def log(self) -> None:
        """Nothing: it is exported, not logged."""

    def log_engine_initialized(self) -> None:
        """Nothing."""

    def record_sleep_state(self, *_: Any) -> None:
        """Nothing: sleep mode is refused beside SPIN."""

    def record_admission_rejection(self, *_: Any) -> None:
        """Nothing: vLLM counts it."""
