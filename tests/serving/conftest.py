from collections.abc import Iterator
from pathlib import Path

import live_server
import pytest
from live_server import LiveServer

from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(folder, tiny_config({}), seed=0)
    return folder


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One server for all tests that leave it healthy; prompts past 512 tokens run in chunks.

    The unmodified indexer: these tests are about the engine underneath.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ("--max-model-len", "32768", "--max-num-batched-tokens", "512", "--spin-off")
    with live_server.running(tiny_model, log, *arguments) as running:
        yield running
