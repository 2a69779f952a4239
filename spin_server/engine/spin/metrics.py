"""SPIN's metrics on vLLM's `/metrics`.

The figures live in the workers; the front end asks for a snapshot every few seconds and exports
the last one. Every rank chooses the same blocks, so one rank speaks for all.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spin_server.engine.spin.settings import SpinSettings

logger = logging.getLogger(__name__)

_TENANT = "default"  # until tenants are configured
_BASE = ("model_name", "engine")


class SpinCollector(Collector):
    """Exports the last snapshot.

    Args:
        model_name: label of every sample.
        settings: the default policy's targets.
        plugins: active plugins by process, as they answered at the start.
    """

    def __init__(
        self, model_name: str, settings: SpinSettings, plugins: dict[str, list[str]]
    ) -> None:
        self._plugins = plugins
        self._base = [model_name, "0"]
        self._policy = settings.default.policy()
        self._enabled = settings.enabled
        self.snapshot: dict[str, Any] | None = None
        self.desired_revision: int | None = None  # of the policies, once somebody sets one

    def collect(self) -> Iterator[Metric]:
        """Yield SPIN's metric families; no counters before the first snapshot."""
        active = GaugeMetricFamily(
            "spin_plugin_active",
            "1 for each of spin-server's plugins in each process of the engine",
            labels=[*_BASE, "process", "plugin"],
        )
        for process, plugins in self._plugins.items():
            for plugin in plugins:
                active.add_metric([*self._base, process, plugin], 1)
        yield active
        if self.snapshot is None or not self._enabled:
            return
        yield from self._blocks(self.snapshot)
        yield from self._state(self.snapshot)

    def _blocks(self, snapshot: dict[str, Any]) -> Iterator[Metric]:
        per_layer = CounterMetricFamily(
            "spin_layer_kv_blocks",
            "KV blocks of decode steps, by layer and outcome",
            labels=[*_BASE, "layer", "outcome"],
        )
        totals: dict[str, int] = {}
        for layer, outcomes in snapshot["layers"].items():
            for outcome, count in outcomes.items():
                per_layer.add_metric([*self._base, str(layer), outcome], count)
                totals[outcome] = totals.get(outcome, 0) + count
        blocks = CounterMetricFamily(
            "spin_kv_blocks",
            "KV blocks of decode steps, by tenant and outcome; outcomes are disjoint",
            labels=[*_BASE, "tenant", "outcome"],
        )
        for outcome, count in totals.items():
            blocks.add_metric([*self._base, _TENANT, outcome], count)
        yield from (per_layer, blocks)

        kept = totals.get("exploit", 0) + totals.get("explore", 0) + totals.get("forced", 0)
        yield self._ratio(
            "spin_block_sparsity_ratio",
            "share of KV blocks skipped, dense steps included (effective), and its target",
            float(self._policy.sparsity),
            totals.get("skipped", 0) / max(sum(totals.values()), 1),
        )
        yield self._ratio(
            "spin_exploration_ratio",
            "share of the kept KV blocks that explored (effective), and its target",
            float(self._policy.exploration),
            totals.get("explore", 0) / max(kept, 1),
        )

    def _ratio(self, name: str, text: str, target: float, effective: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*_BASE, "tenant", "kind"])
        family.add_metric([*self._base, _TENANT, "target"], target)
        family.add_metric([*self._base, _TENANT, "effective"], effective)
        return family

    def _state(self, snapshot: dict[str, Any]) -> Iterator[Metric]:
        for name, text, key in (
            ("spin_ema_resets", "histories that started anew", "resets"),
            ("spin_fallback_steps", "decode rows scored densely outside SPIN's steps", "fallbacks"),
        ):
            family = CounterMetricFamily(name, text, labels=[*_BASE, "reason"])
            for reason, count in snapshot[key].items():
                family.add_metric([*self._base, reason], count)
            yield family
        for name, text, key in (
            ("spin_state_slots_in_use", "requests that hold a history", "slots_in_use"),
            ("spin_state_slots", "histories that there is room for", "slots"),
            (
                "spin_min_context_tokens",
                "contexts of no more tokens are scored densely",
                "min_context",
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_BASE)
            gauge.add_metric(self._base, snapshot[key])
            yield gauge
        traces = CounterMetricFamily(
            "spin_recorded_traces", "traces that were recorded", labels=[*_BASE, "result"]
        )
        for result, count in snapshot["traces"].items():
            traces.add_metric([*self._base, result], count)
        yield traces
        for name, text, key in (
            ("spin_overhead_seconds", "time of SPIN's own work in the layers", "seconds"),
            ("spin_overhead_calls", "layer calls whose time was taken", "calls"),
        ):
            counter = CounterMetricFamily(name, text, labels=_BASE)
            counter.add_metric(self._base, snapshot["overhead"][key])
            yield counter
        revision = GaugeMetricFamily(
            "spin_config_revision", "revision of the policy table", labels=[*_BASE, "kind"]
        )
        revision.add_metric([*self._base, "applied"], snapshot["revision"])
        if self.desired_revision is not None:
            revision.add_metric([*self._base, "desired"], self.desired_revision)
        yield revision


async def poll(engine_client: Any, collector: SpinCollector, period_seconds: float) -> None:
    """Refresh the collector until cancelled; a failed refresh keeps the last figures."""
    while True:
        try:
            reports = await engine_client.collective_rpc("spin_snapshot")
            collector.snapshot = next(report for report in reports if report["rank"] == 0)
        except Exception as error:  # the engine is dying, which the launcher notices
            logger.warning("no metrics from the workers: %s", error)
        await asyncio.sleep(period_seconds)
