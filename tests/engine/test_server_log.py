"""What of a client's mistakes is in the server's log."""

import logging

import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from spin_server.engine import server
from spin_server.errors import InputError
from spin_server.key_text import BlackOut

KEY = "spin_" + "a" * 43


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (GracefulHTTPError("2 of 2 are open", 429), "refused: 2 of 2 are open"),
        (InputError("prompt", "fewer tokens", 7), "refused: prompt: expected fewer tokens, got 7"),
        (VLLMValidationError("too long"), "refused: too long"),
        (RuntimeError("a fault"), "Error in create_messages: a fault"),
    ],
)
def test_what_is_refused_is_one_line(
    caplog: pytest.LogCaptureFixture, error: Exception, logged: str
) -> None:
    caplog.handler.addFilter(server._refusal_in_one_line)
    try:
        raise error
    except Exception as caught:
        logging.getLogger("x").exception("Error in create_messages: %s", caught)
    (record,) = caplog.records
    assert record.getMessage() == logged
    assert (record.exc_info is None) is logged.startswith("refused")


def test_key_in_an_address_is_blacked_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(BlackOut())
    caplog.set_level(logging.INFO, "address")
    line = '%s - "%s %s HTTP/%s" %d'
    logging.getLogger("address").warning(line, "1.2.3.4", "GET", f"/health?a={KEY}&b=1", "1.1", 200)
    assert caplog.records[0].getMessage() == '1.2.3.4 - "GET /health?a=spin_…&b=1 HTTP/1.1" 200'
