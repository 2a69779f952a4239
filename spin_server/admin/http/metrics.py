"""What the admin API counts of itself."""

from collections.abc import Callable
from functools import partial

from prometheus_client import Counter, Gauge
from prometheus_client.registry import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spin_server.admin.http.context import Services

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class AdminMetrics:
    """Counters and gauges of the admin API.

    Args:
        registry: where they are exported.
        services: whose revisions are exported.
    """

    def __init__(self, registry: CollectorRegistry, services: Services) -> None:
        self.requests = Counter(
            "spin_admin_requests",
            "requests of the admin API",
            ("route", "method", "code"),
            registry=registry,
        )
        desired = Gauge(
            "spin_admin_store_revision", "newest revision of the admin store", registry=registry
        )
        desired.set_function(lambda: services.administration.state.revision)
        behind = Gauge(
            "spin_admin_behind_seconds",
            "for how long the engine has lacked the store's newest revision",
            registry=registry,
        )
        behind.set_function(services.applier.behind_seconds)
        trouble = Gauge(
            "spin_admin_trouble",
            "1 while the store cannot be used, the engine does not take the policies, or rows lack",
            ("of",),
            registry=registry,
        )
        for of, found in {
            "store": lambda: services.administration.trouble,
            "engine": lambda: services.applier.trouble,
            "rows": services.applier.unserved_trouble,
        }.items():
            trouble.labels(of).set_function(partial(_flag, found))


def _flag(found: Callable[[], str | None]) -> float:
    return float(found() is not None)


class CountRequests:
    """Counts requests by route, method and status; what matches no route counts as one.

    Args:
        app: what is behind.
        metrics: where they are counted.
    """

    def __init__(self, app: ASGIApp, metrics: AdminMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:  # answered with 500 further out
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(route, method, str(status)).inc()
