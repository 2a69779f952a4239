"""Run vLLM's OpenAI server, and refuse to serve unless our plugins are active everywhere."""

import argparse
import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.registry import Collector

from spin_server import environment
from spin_server.algorithm.options import SpinOptions
from spin_server.engine import preflight, presence
from spin_server.engine.server_arguments import (
    check_model,
    in_one_line,
    parse,
    refuse_beside_keys,
    refuse_on_gpu,
)
from spin_server.engine.spin.admission import PolicyGate
from spin_server.engine.spin.control import EngineControl
from spin_server.engine.spin.metrics import SpinCollector, poll
from spin_server.engine.spin.settings import (
    CONFIG_KEY,
    SpinSettings,
)
from spin_server.engine.tenancy.door import MIDDLEWARE, set_porter
from spin_server.engine.tenancy.refusals import Refusals
from spin_server.engine.tenancy.usage import TenantUsage
from spin_server.errors import InputError, StartupError
from spin_server.key_text import BlackOut
from spin_server.profiles.profile import Profile

logger = logging.getLogger(__name__)

_PAGE_SLOTS = SpinOptions().block_size
# A snapshot waits for the step that is running, so it must stay rare.
_METRICS_PERIOD_SECONDS = 5.0
# How long open responses may go on after a signal.
_STREAM_SECONDS = 5
# Of vLLM, these log a traceback of whatever is refused.
_LOG_REFUSALS = ("vllm.entrypoints.anthropic.api_router",)


class Guest(Protocol):
    """Runs beside the server, from before it is ready until it has stopped."""

    @property
    def port(self) -> int:
        """Where it listens; 0: anywhere."""
        ...

    def __call__(self, control: EngineControl) -> AbstractAsyncContextManager[None]:
        """Run it."""
        ...


def serve(
    model: str,
    vllm_arguments: Sequence[str],
    settings: SpinSettings,
    guest: Guest | None = None,
    *,
    profile: Profile | None = None,
) -> bool:
    """Serve a model until a signal or the engine's death.

    Args:
        model: a folder, or a name for vLLM to look up.
        vllm_arguments: vLLM's own, unchanged; ours are added where they are absent.
        settings: SPIN's, for every process of the engine.
        guest: runs in the event loop of the server, and may change its policies.
        profile: where the first of `vllm_arguments` come from, for a message that names it.

    Returns:
        True after a requested shutdown, False if the engine died.

    Raises:
        SpinError: what cannot be served, with the reason.
    """
    started = time.monotonic()
    environment.prepare_engine()
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if settings.enabled and not on_cpu:
        logger.info("device: %s", preflight.check_gpu())
        refuse_on_gpu(settings)
    if on_cpu:
        preflight.check_cpu()
        environment.prepare_cpu_engine()
    required = presence.allow_plugins(on_cpu=on_cpu)

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    _require("the front end", required, presence.active_plugins())

    args = parse(model, vllm_arguments, on_cpu=on_cpu, profile=profile)
    if guest is not None:
        refuse_beside_keys(args)
        if not args.uds and guest.port == args.port:
            # Two sockets of one process may have the same address until one of them listens.
            raise InputError("--admin-port", "another port than the server's --port", guest.port)
    if not args.uds:
        preflight.check_port(args.host or "", args.port)
    if not isinstance(args.additional_config or {}, dict):
        raise InputError("--additional-config", "a JSON object", repr(args.additional_config))
    args.additional_config = {
        **(args.additional_config or {}),
        CONFIG_KEY: settings.model_dump(mode="json"),
    }

    import uvloop

    survived: bool = uvloop.run(_serve(args, required, settings, started, guest))
    return survived


def _require(process: str, required: Sequence[str], active: Sequence[str]) -> None:
    missing = sorted(set(required) - set(active))
    if missing:
        raise StartupError(
            f"{process}: expected vLLM plugins {', '.join(required)} to be active, but "
            f"{', '.join(missing)} is not; vLLM's log above says why it was skipped"
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """What the processes of the engine answered.

    Args:
        plugins: active plugins by process, the front end included.
        spin_bytes: what SPIN's histories take in each worker.
        min_context: tokens; contexts of no more are scored densely.
        max_context: tokens; --max-model-len.
    """

    plugins: dict[str, list[str]]
    spin_bytes: int
    min_context: int
    max_context: int


async def _verify(engine_client: Any, required: Sequence[str], settings: SpinSettings) -> Verified:
    """Ask the engine core and every worker for their active plugins.

    Raises:
        StartupError: a plugin, a kernel or a hook is missing somewhere.
    """
    try:
        cores = await engine_client.engine_core.call_utility_all_async("spin_plugins")
    except Exception as error:  # vLLM raises a bare Exception for a method that does not exist
        raise StartupError(
            f"engine core: expected vLLM plugins {', '.join(required)} to be active, but it does "
            f"not answer for them ({in_one_line(error)})"
        ) from error
    reports = await engine_client.collective_rpc("spin_presence")
    plugins = {
        "front end": presence.active_plugins(),
        **{f"engine core {index}": active for index, active in enumerate(cores)},
        **{f"worker {r['rank']} (process {r['pid']})": r["plugins"] for r in reports},
    }
    for process, active in plugins.items():
        _require(process, required, active)
    for report in reports:
        process = f"worker {report['rank']} (process {report['pid']})"
        if report["missing_kernels"]:
            kernels = ", ".join(report["missing_kernels"])
            raise StartupError(f"{process}: no replacement in place for the kernels {kernels}")
        if settings.enabled and not (report["spin_layers"] and report["spin_follows"]):
            raise StartupError(
                f"{process}: expected SPIN in front of the indexer, but it serves "
                f"{report['spin_layers']} layers and the model runner "
                f"{'is' if report['spin_follows'] else 'is not'} followed"
            )
        if settings.enabled and report["page_slots"] != [_PAGE_SLOTS]:
            raise StartupError(
                f"{process}: expected KV pages of {_PAGE_SLOTS} slots in the indexer, SPIN's "
                f"blocks, got {report['page_slots']}; leave --block-size to vLLM"
            )
    return Verified(
        plugins,
        max(report["spin_bytes"] for report in reports),
        max(report["spin_min_context"] for report in reports),
        engine_client.model_config.max_model_len,
    )


def _export_metrics(
    args: argparse.Namespace, settings: SpinSettings, verified: Verified
) -> SpinCollector:
    """Add SPIN's metrics to vLLM's."""
    name = (args.served_model_name or [args.model])[0]
    collector = SpinCollector(name, settings, verified.plugins)
    _export(collector)
    return collector


def _export_usage(engine_client: Any, collector: SpinCollector) -> None:
    """Count what tenants use, where vLLM counts at all (--disable-log-stats)."""
    if engine_client.logger_manager is None:
        return
    usage = TenantUsage(collector)
    usage.watch(engine_client.output_processor)
    engine_client.logger_manager.stat_loggers.append(usage)
    _export(usage)


def _refusal_in_one_line(record: logging.LogRecord) -> bool:
    """Log no traceback of what a client was refused: a limit may be met many times a second."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, GracefulHTTPError | VLLMClientError | InputError):
        record.msg, record.args, record.exc_info = f"refused: {error}", (), None
    return True


def _export(collector: Collector) -> None:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    get_prometheus_registry().register(collector)


async def _serve(
    args: argparse.Namespace,
    required: Sequence[str],
    settings: SpinSettings,
    started: float,
    guest: Guest | None,
) -> bool:
    from vllm.entrypoints.launchers.api_server.entry import (
        build_and_serve,
        build_async_engine_client,
    )
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.platforms import current_platform
    from vllm.utils.system_utils import decorate_logs

    spin_bytes = check_model(args, settings)
    if not settings.enabled:
        spin_bytes = 0
    if current_platform.is_cpu():
        memory = preflight.check_memory(
            args.model, args.kv_cache_memory_bytes, spin_bytes, args.gpu_memory_utilization
        )
        logger.info("memory: %s", memory)
    decorate_logs("APIServer", skip_if_decorated=True)
    try:
        listen_address, sock = setup_server(args, reuse_port=False)
    except Exception as error:  # it imports parsers and binds sockets that were named
        raise StartupError(f"the API server did not start: {in_one_line(error)}") from error
    stopped = False
    async with AsyncExitStack() as stack:
        try:
            engine_client = await stack.enter_async_context(build_async_engine_client(args))
        except Exception as error:  # also what a backend or a parser that was named raises
            raise StartupError(f"the engine did not start: {in_one_line(error)}") from error
        verified = await _verify(engine_client, required, settings)
        gate, collector = PolicyGate(settings), _export_metrics(args, settings, verified)
        _export_usage(engine_client, collector)
        gate.guard(engine_client)
        if guest is not None:
            refusals = Refusals(collector)
            _export(refusals)
            control = EngineControl(engine_client, settings, gate, collector, refusals)
            stack.callback(set_porter, None)
            await stack.enter_async_context(guest(control))
            args.middleware = [*args.middleware, MIDDLEWARE]  # the last is around all others
            logging.getLogger("uvicorn.access").addFilter(BlackOut())
            for name in _LOG_REFUSALS:
                logging.getLogger(name).addFilter(_refusal_in_one_line)
        polling = asyncio.create_task(poll(engine_client, collector, _METRICS_PERIOD_SECONDS))
        shutdown = engine_client.shutdown

        def note_and_shutdown(*arguments: Any, **keywords: Any) -> None:
            nonlocal stopped
            stopped = True
            shutdown(*arguments, **keywords)

        # vLLM's signal handler calls this; its watchdog, which sees an engine die, does not.
        engine_client.shutdown = note_and_shutdown
        announcement = asyncio.create_task(
            _announce(args, listen_address, verified, settings, started)
        )
        try:
            server_shutdown = await build_and_serve(
                engine_client,
                listen_address,
                sock,
                args,
                # Streams of an engine that was stopped never end by themselves.
                timeout_graceful_shutdown=_STREAM_SECONDS,
            )
        except Exception as error:  # certificates, middleware and adapters that were named
            raise StartupError(f"the API server did not start: {in_one_line(error)}") from error
        announcement.cancel()
        polling.cancel()
        died = engine_client.errored and not stopped
    try:
        await server_shutdown
    finally:
        sock.close()
    if died:
        print("spin-server: the engine died; vLLM's log above says why", file=sys.stderr)
    return not died


def spin_in_words(settings: SpinSettings, verified: Verified) -> str:
    """Say what SPIN does in this engine; a warning where no context is long enough for it."""
    if not settings.enabled:
        return "SPIN is off"
    if verified.min_context >= verified.max_context:
        return (
            f"WARNING: SPIN SKIPS NOTHING: contexts of up to {verified.min_context:,} tokens are "
            f"scored densely, and none is longer than --max-model-len {verified.max_context:,}; "
            "lower --spin-min-context, or serve with --spin-off and save its memory"
        )
    policy = settings.default
    return (
        f"SPIN skips {float(policy.sparsity):.0%} of the blocks and explores with "
        f"{float(policy.exploration):.0%} of the rest, in contexts of over "
        f"{verified.min_context:,} tokens; its histories take "
        f"{verified.spin_bytes / 2**30:.2f} GiB in each worker"
    )


async def _announce(
    args: argparse.Namespace,
    url: str,
    verified: Verified,
    settings: SpinSettings,
    started: float,
) -> None:
    """Say that the server is ready once it accepts connections, and what to try."""
    while not args.uds:
        try:
            _, writer = await asyncio.open_connection(args.host, args.port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        break
    name = (args.served_model_name or [args.model])[0]
    body = f'{{"model": "{name}", "prompt": "Hello", "max_tokens": 64, "stream": true}}'
    curl = (
        f"curl -N {url}/v1/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    )
    spin = spin_in_words(settings, verified)
    print(
        f"\nspin-server: ready at {url} after {time.monotonic() - started:.0f} s; "
        f"plugins checked in {len(verified.plugins)} processes (launcher: {os.getpid()})\n"
        f"{spin}\n\n"
        f"Stream a completion:\n  {curl}\n",
        flush=True,
    )
