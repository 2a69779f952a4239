"""What vLLM's arguments ask for, refused in one line before anything loads."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from spin_server.engine import server, server_arguments
from spin_server.engine.spin.settings import SpinSettings
from spin_server.errors import InputError, UnsupportedError
from spin_server.tiny_model.checkpoint import write_checkpoint
from spin_server.tiny_model.config import tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(folder, tiny_config({}), seed=0)
    return str(folder)


def check(model: str, *arguments: str, enabled: bool = True) -> int:
    args = server_arguments.parse(model, ["--max-model-len", "4096", *arguments], on_cpu=True)
    return server_arguments.check_model(args, SpinSettings(enabled=enabled))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # Each way of asking, for vLLM makes one configuration of several.
        (
            ["--spec-method", "mtp", "--spec-tokens", "1"],
            "speculative decoding on a CPU beside SPIN",
        ),
        (
            ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'],
            "speculative decoding on a CPU beside SPIN",
        ),
        (["--kv-offloading-size", "4"], "KV transfer or offloading beside SPIN"),
        (["--pipeline-parallel-size", "2"], "pipeline parallelism beside SPIN"),
    ],
)
def test_what_spin_does_not_handle_is_refused_beside_it_only(
    model: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check(model, *arguments)
    check(model, *arguments, enabled=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "/nope.yaml"], "No such file"),
        (["--chat-template", "/nope.jinja"], "doesn't exist"),
        (["--reasoning-parser", "nope"], "'nope' not found"),
        (["--distributed-executor-backend", "foo.bar"], "No module named 'foo'"),
        (["--max-num-seqs", "-5"], "greater than or equal to 1"),
    ],
)
def test_argument_that_makes_no_sense_to_vllm_is_one_line(
    model: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check(model, *arguments)
    assert "\n" not in str(caught.value)


def test_what_a_cpu_engine_cannot_be_asked_for_is_refused_beside_spin() -> None:
    asked = {
        "microbatching": ("parallel_config", "use_ubatching"),
        "sleep mode": ("model_config", "enable_sleep_mode"),
        "HiSparse": ("attention_config", "hisparse_config"),
    }
    for what, (part, name) in asked.items():
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, use_ubatching=False),
            model_config=SimpleNamespace(enable_sleep_mode=False),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            kv_transfer_config=None,
        )
        server_arguments._refuse_beside_spin(config)
        setattr(getattr(config, part), name, True)
        with pytest.raises(UnsupportedError, match=f"{what} .*beside SPIN is not supported"):
            server_arguments._refuse_beside_spin(config)


@pytest.mark.parametrize(
    ("method", "adaptive", "message"),
    [
        ("mtp", False, None),
        ("ngram", False, "speculative decoding by ngram beside SPIN"),
        ("mtp", True, "adaptive verification of drafts beside SPIN"),
    ],
)
def test_drafts_of_mtp_alone_are_taken_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, method: str, adaptive: bool, message: str | None
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, use_ubatching=False),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        speculative_config=SimpleNamespace(method=method, enable_adaptive_verification=adaptive),
        kv_transfer_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    if message is None:
        server_arguments._refuse_beside_spin(config)
    else:
        with pytest.raises(UnsupportedError, match=message):
            server_arguments._refuse_beside_spin(config)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--decode-context-parallel-size", "2"], "decode context parallelism"),
        (["--prefill-context-parallel-size", "2"], "prefill context parallelism"),
        (["--data-parallel-size", "2"], "data parallelism"),
        (["--api-server-count", "2"], "more than one API server"),
        (["--headless"], "an engine without an API server"),
    ],
)
def test_what_no_release_serves_yet_is_refused_spin_or_not(
    model: str, arguments: list[str], what: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{what} .*is not supported"):
        server_arguments.parse(model, arguments, on_cpu=True)


def test_more_requests_take_more_histories(model: str) -> None:
    one, two = (check(model, "--max-num-seqs", str(n)) for n in (8, 16))
    assert two == 2 * one


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        (["--api-key", "k"], None, "--api-key"),
        ([], "VLLM_API_KEY", "--api-key"),
        ([], "VLLM_ENABLE_RESPONSES_API_STORE", "stored responses belong to no tenant"),
        ([], None, None),
    ],
)
def test_what_would_let_callers_past_their_keys_is_refused(
    model: str,
    arguments: list[str],
    variable: str | None,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    args = server_arguments.parse(model, ["--max-model-len", "4096", *arguments], on_cpu=True)
    with nullcontext() if message is None else pytest.raises(UnsupportedError, match=message):
        server_arguments.refuse_beside_keys(args)


def test_guest_on_the_servers_own_port_is_refused_before_anything_loads(model: str) -> None:
    guest = SimpleNamespace(port=8123)
    with pytest.raises(InputError, match="--admin-port: expected another port than the server's"):
        server.serve(model, ["--port", "8123"], SpinSettings(), guest)
