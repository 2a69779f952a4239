"""SPIN's metrics on vLLM's `/metrics`.

The figures live in the workers; the front end asks for a snapshot every few seconds and exports
the last one. Every rank chooses the same blocks, so one rank speaks for all, as long as they agree.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spin_server.engine.spin.settings import SpinSettings
from spin_server.policy.policy import DEFAULT, Policy

logger = logging.getLogger(__name__)

OTHER = "_other"  # label of all who have no series of their own
CANARY = "/canary"  # no tenant's name has a slash
_MOST_TENANTS = 64  # with series of their own; the rest share one
_BASE = ("model_name", "engine")
# Of a snapshot, what every rank has alike.
_ALIKE = ("layers", "policies", "fallbacks", "resets", "slots_in_use", "revision", "choices")


def _is_canary(name: str) -> bool:
    return name.endswith(CANARY)


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
        self._plugins, self.model_name = plugins, model_name
        self._base = [model_name, "0"]
        self._enabled = settings.enabled
        named = {name: given.policy() for name, given in settings.policies.items()}
        self.names = {0: DEFAULT} | dict(enumerate(named, start=1))  # of the table's rows
        self._labels = self._own_labels()
        self.policies = {0: settings.default.policy()} | dict(enumerate(named.values(), start=1))
        self.tenants: defaultdict[str, Counter[str]] = defaultdict(Counter)  # blocks by outcome
        self._counted: dict[int, dict[str, int]] = {}  # what was last seen of each row
        self.snapshot: dict[str, Any] | None = None
        self.ranks_agree = True
        self.desired_revision: int | None = None  # of the policies, once somebody sets one

    def label(self, tenant: str) -> str:
        """Get the label of a tenant: its name if it has series of its own, or `_other`."""
        return tenant if tenant in self._labels else OTHER

    def _own_labels(self) -> frozenset[str]:
        """Names of the first rows' owners, canaries aside."""
        owners = sorted((row, name) for row, name in self.names.items() if not _is_canary(name))
        return frozenset(name for _, name in owners[:_MOST_TENANTS])

    def name_rows(self, rows: Mapping[str, int], first_row: int) -> None:
        """Say whose the rows from `first_row` on are now."""
        # A canary that is over keeps its name, and its figures, until its row is somebody else's.
        kept = {
            row: name
            for row, name in self.names.items()
            if row < first_row
            or (_is_canary(name) and name.removesuffix(CANARY) in {DEFAULT, *rows})
        }
        self.names = kept | {row: name for name, row in rows.items()}
        self._labels = self._own_labels()
        gone = self.tenants.keys() - set(self.names.values()) - {OTHER}
        for name in gone:
            self.tenants[OTHER].update(self.tenants.pop(name))

    def take(self, snapshot: dict[str, Any]) -> None:
        """Take a worker's newest figures; a row's new blocks are its present owner's."""
        counted = {int(row): outcomes for row, outcomes in snapshot["policies"].items()}
        for row, outcomes in counted.items():
            before = self._counted.get(row, {})
            new = {outcome: count - before.get(outcome, 0) for outcome, count in outcomes.items()}
            if any(new.values()):
                self.tenants[self.names.get(row, OTHER)].update(new)
        self._counted, self.snapshot = counted, snapshot

    def take_ranks(self, reports: Sequence[dict[str, Any]]) -> None:
        """Take the newest figures of all workers: rank 0's, and whether the others' are the same.

        Args:
            reports: see `SpinWorkerExtension.spin_snapshot`; all of one moment.
        """
        first, *others = sorted(reports, key=lambda report: int(report["rank"]))
        differing = [
            (report["rank"], part)
            for report in others
            for part in _ALIKE
            if report.get(part) != first.get(part)
        ]
        if differing and self.ranks_agree:
            rank, part = differing[0]
            logger.warning(
                "rank %d and rank 0 no longer choose alike (%s): serve on one rank or with "
                "--spin-off; `spin-server doctor MODEL --ranks N` says where it begins",
                rank,
                part,
            )
        self.ranks_agree = not differing
        self.take(first)

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
        for layer, outcomes in snapshot["layers"].items():
            for outcome, count in outcomes.items():
                per_layer.add_metric([*self._base, str(layer), outcome], count)
        yield per_layer
        blocks = CounterMetricFamily(
            "spin_kv_blocks",
            "KV blocks of decode steps, by tenant and outcome; outcomes are disjoint",
            labels=[*_BASE, "tenant", "outcome"],
        )
        sparsity = GaugeMetricFamily(
            "spin_block_sparsity_ratio",
            "share of KV blocks skipped, dense steps included (effective), and its target",
            labels=[*_BASE, "tenant", "kind"],
        )
        exploration = GaugeMetricFamily(
            "spin_exploration_ratio",
            "share of the kept KV blocks that explored (effective), and its target",
            labels=[*_BASE, "tenant", "kind"],
        )
        for tenant, (policy, counts) in self._shown().items():
            for outcome, count in counts.items():
                blocks.add_metric([*self._base, tenant, outcome], count)
            kept = sum(counts.get(outcome, 0) for outcome in ("exploit", "explore", "forced"))
            skipped = counts.get("skipped", 0) / max(sum(counts.values()), 1)
            explored = counts.get("explore", 0) / max(kept, 1)
            for family, effective, target in (
                (sparsity, skipped, policy.sparsity if policy else None),
                (exploration, explored, policy.exploration if policy else None),
            ):
                if target is not None:
                    family.add_metric([*self._base, tenant, "target"], float(target))
                family.add_metric([*self._base, tenant, "effective"], effective)
        yield from (blocks, sparsity, exploration)

    def _shown(self) -> dict[str, tuple[Policy | None, dict[str, int]]]:
        """Policy and blocks of everybody who has series of his own, and of the rest together."""
        # Canaries first: few, short-lived, and of no use if they cannot be told apart.
        ordered = sorted(self.names.items(), key=lambda named: (not _is_canary(named[1]), named[0]))
        names = [name for _, name in ordered][:_MOST_TENANTS]
        rows = {name: row for row, name in self.names.items()}
        shown: dict[str, tuple[Policy | None, dict[str, int]]] = {
            name: (self.policies.get(rows[name]), self.tenants.get(name, {})) for name in names
        }
        rest: Counter[str] = Counter()
        for name, counts in self.tenants.items():
            if name not in shown:
                rest.update(counts)
        return shown | ({OTHER: (None, rest)} if rest else {})

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
        agree = GaugeMetricFamily(
            "spin_ranks_agree",
            "1 if every rank chose alike in the last step that was looked at, and counts alike",
            labels=_BASE,
        )
        agree.add_metric(self._base, self.ranks_agree)
        yield agree
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
            collector.take_ranks(reports)
        except Exception as error:  # the engine is dying, which the launcher notices
            logger.warning("no metrics from the workers: %s", error)
        await asyncio.sleep(period_seconds)
