"""Every route of the admin API against its own OpenAPI description, with made-up requests."""

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import schemathesis
import uvicorn
from admin_app import AdminApp, require_described
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

# Tests are made from the description while they are collected.
FOLDER = tempfile.TemporaryDirectory()
ADMIN = AdminApp(Path(FOLDER.name))
LISTENER = socket.create_server(("127.0.0.1", 0))
DESCRIPTION = ADMIN.app.openapi()
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
SCHEMA.config.update(base_url=f"http://127.0.0.1:{LISTENER.getsockname()[1]}")
# RFC 6585 has a status of its own for a write without If-Match.
SCHEMA.config.checks.missing_required_header.expected_statuses = ["403", "422", "428"]
# JSON Schema cannot say that a time is to come, or that a number has at most nine decimals.
UNSAYABLE = [positive_data_acceptance]


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(ADMIN.app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [LISTENER]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield
    server.should_exit = True
    thread.join()
    ADMIN.store.close()
    FOLDER.cleanup()


@SCHEMA.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(
    case: schemathesis.Case, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        case.call_and_validate(
            headers={"Authorization": f"Bearer {ADMIN.key}"}, excluded_checks=UNSAYABLE
        )
    assert not caplog.records


def test_description_covers_every_route() -> None:
    operations = [found for path in DESCRIPTION["paths"].values() for found in path.values()]
    assert len(operations) == 18
    for operation in operations:
        assert operation["summary"]
        assert {"401", "403", "422"} <= operation["responses"].keys()


def test_description_says_what_every_answer_holds() -> None:
    for path, operations in DESCRIPTION["paths"].items():
        for method, operation in operations.items():
            for status in {"200", "201"} & operation["responses"].keys():
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert "additionalProperties" not in schema, (method, path, status)
    for name, schema in DESCRIPTION["components"]["schemas"].items():
        if "properties" in schema and name != "Problem":
            assert schema["additionalProperties"] is False, name


def test_description_says_what_a_client_has_to_send() -> None:
    assert DESCRIPTION["components"]["securitySchemes"]["key"] == {
        "type": "http",
        "scheme": "bearer",
    }
    conditional = set()
    for path, operations in DESCRIPTION["paths"].items():
        for method, operation in operations.items():
            assert operation["security"] == [{"key": []}]
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "If-Match":
                    assert (parameter["required"], parameter["in"]) == (True, "header")
                    conditional.add((method, path))
            if method == "patch":
                content = operation["requestBody"]["content"]
                patch = content["application/merge-patch+json"]
                assert patch == content["application/json"]
            for answer in operation["responses"].values():
                assert "X-Request-Id" in answer["headers"]
    assert conditional == {
        ("patch", "/v1/policies/{name}"),
        ("patch", "/v1/tenants/{name}"),
        ("delete", "/v1/tenants/{name}"),
        ("delete", "/v1/keys/{key_id}"),
        ("post", "/v1/keys/{key_id}/rotate"),
        ("post", "/v1/revisions/{revision}/revert"),
    }


def test_answer_that_is_not_as_described_is_refused() -> None:
    request = SimpleNamespace(url=SimpleNamespace(path="/v1/keys/key-1"), method="DELETE")
    for body, right in (({"revoked": "key-1"}, True), ({"revoked": "key-1", "by": "me"}, False)):
        answer = SimpleNamespace(
            request=request, status_code=200, headers={}, json=lambda body=body: body
        )
        with nullcontext() if right else pytest.raises(jsonschema.ValidationError):
            require_described(ADMIN.app, answer)
