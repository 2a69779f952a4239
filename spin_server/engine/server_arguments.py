"""vLLM's arguments: parsed by vLLM, and refused where SPIN, or this release, cannot serve them."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from spin_server.engine import preflight
from spin_server.engine.model_support import (
    IndexerGeometry,
    indexer_geometry,
    require_cpu_kernels,
)
from spin_server.engine.spin.layers import history_bytes
from spin_server.engine.spin.settings import RecordSettings, SpinSettings, num_places
from spin_server.engine.stepped import WORKER_EXTENSION
from spin_server.errors import InputError, UnsupportedError
from spin_server.profiles.profile import Profile

_DEFAULT_HOST = "127.0.0.1"


def parse(
    model: str, vllm_arguments: Sequence[str], *, on_cpu: bool, profile: Profile | None = None
) -> argparse.Namespace:
    """Parse vLLM's arguments with vLLM's parser, and refuse those that we cannot serve.

    Args:
        model: a folder, or a name for vLLM to look up.
        vllm_arguments: all of them.
        on_cpu: whether to set our defaults for a CPU.
        profile: the first of them, whose mistakes are told by its name.

    Raises:
        InputError: what vLLM does not take.
        UnsupportedError: what we cannot serve.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="spin-server serve MODEL"))
    parser.set_defaults(host=_DEFAULT_HOST)
    if on_cpu:
        # vLLM's CPU build compiles for minutes to gain nothing at this size.
        parser.set_defaults(enforce_eager=True, enable_prompt_tokens_details=True)
    if profile is not None:
        _refuse_unknown(parser, profile)
    try:
        args: argparse.Namespace = parser.parse_args(["--model", model, *vllm_arguments])
    except Exception as error:  # vLLM's parser reads files and raises what it meets
        raise _bad_arguments(error) from error
    if args.model != model:
        raise InputError("--model", f"the model to be named once, as {model!r}", repr(args.model))
    _refuse_unsupported(args)
    args.worker_extension_cls = WORKER_EXTENSION
    try:
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
    except Exception as error:  # it raises a class of its own for each kind
        raise _bad_arguments(error) from error
    return args


def _refuse_unknown(parser: Any, profile: Profile) -> None:
    """Parse a profile by itself: full names only, and a mistake is one line with its name."""

    def refuse(message: str) -> NoReturn:
        raise InputError(f"profile {profile.name}", "arguments that vLLM takes", message)

    parser.error, parser.allow_abbrev = refuse, False
    try:
        parser.parse_args(list(profile.arguments))
    except InputError:
        raise
    except Exception as error:  # as above
        refuse(in_one_line(error) or type(error).__name__)
    finally:
        del parser.error
        parser.allow_abbrev = True


def _bad_arguments(error: Exception) -> InputError:
    """Say in one line what vLLM thinks of its arguments."""
    text = in_one_line(error) or type(error).__name__
    return InputError("vLLM's arguments", "a valid combination", text)


def _refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuse what vLLM could do and this release cannot verify or handle."""
    reasons = {
        "more than one API server (--api-server-count)": (args.api_server_count or 1) > 1,
        "data parallelism (--data-parallel-size)": args.data_parallel_size > 1,
        "an engine without an API server (--headless)": args.headless,
        "the gRPC server (--grpc)": getattr(args, "grpc", False),
        "another --worker-extension-cls": bool(args.worker_extension_cls),
        "decode context parallelism": args.decode_context_parallel_size > 1,
        "prefill context parallelism": args.prefill_context_parallel_size > 1,
    }
    for what, asked in reasons.items():
        if asked:
            raise UnsupportedError(f"{what} is not supported")


def refuse_beside_keys(args: argparse.Namespace) -> None:
    """Refuse what would let callers past their keys, or tenants at each other's answers."""
    import vllm.envs

    if args.api_key or vllm.envs.VLLM_API_KEY:
        raise UnsupportedError(
            "vLLM's own --api-key (VLLM_API_KEY) beside --admin-store is not supported: make a "
            "tenant, and `spin-server key create`"
        )
    if vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE:
        raise UnsupportedError(
            "VLLM_ENABLE_RESPONSES_API_STORE beside --admin-store is not supported: stored "
            "responses belong to no tenant"
        )


def refuse_on_gpu(settings: SpinSettings) -> None:
    """Refuse what SPIN does on a CPU only."""
    import vllm.envs

    try:
        v2_is_off = vllm.envs.VLLM_USE_V2_MODEL_RUNNER is False
    except ValueError as error:
        raise InputError("VLLM_USE_V2_MODEL_RUNNER", "0 or 1", error) from None
    try:
        forks = vllm.envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"
    except ValueError as error:
        raise InputError("VLLM_WORKER_MULTIPROC_METHOD", "spawn, or nothing", error) from None
    if settings.record is not None:
        raise UnsupportedError(
            "--spin-record on a GPU is not supported: traces are recorded on a CPU engine"
        )
    if v2_is_off:
        raise UnsupportedError(
            "VLLM_USE_V2_MODEL_RUNNER=0 beside SPIN on a GPU is not supported: SPIN follows "
            "requests through the V2 runner; unset it, or serve with --spin-off"
        )
    if forks:
        # vLLM 0.32.0 reads VLLM_USE_BREAKABLE_CUDAGRAPH where its model is imported, and sets it
        # later: a graph in pieces of a process that was forked holds the attention of its capture.
        raise UnsupportedError(
            "VLLM_WORKER_MULTIPROC_METHOD=fork on a GPU is not supported: the engine's graphs "
            "would be captured without breaks; unset it"
        )


def _refuse_beside_spin(config: Any) -> None:
    """Refuse what vLLM serves and SPIN does not handle yet, however it was asked for."""
    parallel = config.parallel_config
    speculative = config.speculative_config
    reasons = {
        **_refused_speculation(speculative),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "KV transfer or offloading": config.kv_transfer_config is not None,
        "microbatching (--enable-dbo, --ubatch-size)": parallel.use_ubatching,
        "sleep mode (--enable-sleep-mode)": config.model_config.enable_sleep_mode,
        "HiSparse": config.attention_config.hisparse_config is not None,
    }
    for what, asked in reasons.items():
        if asked:
            raise UnsupportedError(
                f"{what} beside SPIN is not supported; --spin-off serves without SPIN"
            )


def _refused_speculation(config: Any | None) -> dict[str, bool]:
    from vllm.platforms import current_platform

    if config is None:
        return {}
    return {
        # vLLM's CPU indexer takes one row of a request.
        "speculative decoding on a CPU": current_platform.is_cpu(),
        f"speculative decoding by {config.method}": config.method != "mtp",
        "adaptive verification of drafts": config.enable_adaptive_verification,
    }


def check_model(args: argparse.Namespace, settings: SpinSettings) -> int:
    """Refuse what SPIN cannot serve, in vLLM's final configuration, before weights load.

    Returns:
        Bytes that SPIN takes in each worker.

    Raises:
        UnsupportedError: the reason.
        InputError: vLLM cannot make sense of the arguments.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        )
    except Exception as error:  # it looks up plugins and files, and raises what it meets
        raise _bad_arguments(error) from error
    geometry = indexer_geometry(config.model_config.hf_config.to_dict())
    if settings.enabled:
        _refuse_beside_spin(config)
        if config.speculative_config is not None and geometry.compress_ratio == 1:
            raise UnsupportedError(
                "speculative decoding of a model with one slot per token (DeepSeek-V3.2, GLM-5) "
                "beside SPIN is not supported; --spin-off serves without SPIN"
            )
    if current_platform.is_cpu():
        require_cpu_kernels(geometry)
    if settings.record is not None:
        _check_record(settings.record, geometry)
    requests = config.scheduler_config.max_num_seqs
    sizes = {
        "num_states": num_places(settings, requests),
        "max_slots": config.model_config.max_model_len // geometry.compress_ratio,
    }
    if current_platform.is_cpu():
        return history_bytes(len(geometry.layers), history=settings.history, **sizes)
    from spin_server.engine.spin.device import device_bytes

    spin_bytes = device_bytes(
        len(geometry.layers),
        num_rows=requests,
        num_drafts=config.num_speculative_tokens,
        num_policies=settings.capacity,
        history=settings.history,
        **sizes,
    )
    if settings.enabled:
        ranks = config.parallel_config.tensor_parallel_size
        weights = preflight.weight_bytes(args.model) // ranks
        preflight.check_gpu_memory(spin_bytes, weights, args.gpu_memory_utilization)
    return spin_bytes


def _check_record(record: RecordSettings, geometry: IndexerGeometry) -> None:
    """Refuse a record that could not be written, or would be empty."""
    absent = sorted(set(record.layers) - set(geometry.layers))
    if absent:
        raise InputError(
            "--spin-record-layers",
            f"layers that have an indexer, of {', '.join(map(str, geometry.layers))}",
            ", ".join(map(str, absent)),
        )
    try:
        Path(record.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=record.folder):
            pass
    except OSError as error:
        raise InputError(f"--spin-record {record.folder}", "a writable folder", error) from None


def in_one_line(error: Exception) -> str:
    """Put vLLM's error in one line; pydantic's spread over several."""
    details = getattr(error, "errors", None)
    text = "; ".join(str(d["msg"]) for d in details()) if callable(details) else str(error)
    return " ".join(text.split())
