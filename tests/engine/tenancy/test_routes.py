"""Every route that the pinned vLLM has, against what tenants may use."""

import pytest

from spin_server import environment
from spin_server.engine.tenancy.routes import FREE, SERVED

# Read one by one, and denied; a new release's new routes are denied too, and fail this test.
DENIED = {
    ("GET", "/docs"),
    ("GET", "/docs/oauth2-redirect"),
    ("GET", "/kv_event_sources"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
    ("GET", "/redoc"),
    ("GET", "/v1/responses/{response_id}"),
    ("GET", "/version"),
    ("POST", "/generative_scoring"),
    ("POST", "/inference/v1/abort_requests"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/is_scaling_elastic_ep"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/v1/chat/completions/derender"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/derender"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/messages/render"),
    ("POST", "/v1/responses/render"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/systemone"),
}


def test_every_route_is_served_free_or_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.prepare_engine()
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m"])
    app = build_app(args, ("generate",))
    found = {
        (method, route.path)
        for route in app.routes
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}
    }
    assert found == (FREE - {("GET", "/metrics/")}) | SERVED | DENIED
