"""How often callers were refused, as a metric."""

from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from spin_server.engine.spin.metrics import OTHER, SpinCollector
from spin_server.policy.policy import DEFAULT

# Of what is behind the door a caller's own mistakes, 400 and 422, are not counted.
COUNTED = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
NOBODY = ""


class Refusals(Collector):
    """Counts requests that were refused, by tenant and status.

    Args:
        collector: of SPIN's metrics, which knows the labels.
    """

    def __init__(self, collector: SpinCollector) -> None:
        self._base, self._label = [collector.model_name, "0"], collector.label
        self._counts: Counter[tuple[str, int]] = Counter()

    def count(self, tenant: str | None, status: int) -> None:
        """Count one, if its status says that it was refused.

        Args:
            tenant: None: a key of no tenant; `NOBODY`: no key that is known.
        """
        if status in COUNTED:
            self._counts[DEFAULT if tenant is None else tenant, status] += 1

    def _settle(self) -> None:
        """Put together what tenants were refused that have no label of their own any more."""
        for tenant, status in list(self._counts):
            label = tenant if tenant in (NOBODY, OTHER) else self._label(tenant)
            if label != tenant:
                self._counts[label, status] += self._counts.pop((tenant, status))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family."""
        self._settle()
        family = CounterMetricFamily(
            "spin_refused_requests",
            "requests refused for their key, their route, their size or their tenant's limits",
            labels=["model_name", "engine", "tenant", "status"],
        )
        for (tenant, status), count in sorted(self._counts.items()):
            family.add_metric([*self._base, tenant, str(status)], count)
        yield family
