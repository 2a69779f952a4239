"""The `--spin-*` arguments of `spin-server serve`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spin_server.cli.own_arguments import own_parser, take_own
from spin_server.engine.spin.settings import PolicySettings, SpinSettings
from spin_server.errors import InputError
from spin_server.yaml_file import read_yaml

_RECORD_LIMITS = ("requests", "steps", "bytes")
_POLICY_FIELDS = ("sparsity", "exploration", "exploration_policy", "ema_decay", "probe_period")


def take_spin_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take our arguments out of a command line, whatever they ask for.

    Returns:
        Our arguments, and what is left for vLLM.

    Raises:
        InputError: an argument that SPIN does not know, or a value of another type.
    """
    # A command line can take back what a profile switches on.
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
    parser = own_parser()
    for field in _POLICY_FIELDS:
        kind = int if field == "probe_period" else str
        parser.add_argument(f"--spin-{field.replace('_', '-')}", dest=field, type=kind)
    parser.add_argument("--spin-policies", type=Path)
    parser.add_argument("--spin-capacity", type=int)
    parser.add_argument("--spin-places", type=int)
    parser.add_argument("--spin-min-context", type=int)
    parser.add_argument("--spin-history")
    parser.add_argument("--spin-mask")
    parser.add_argument("--spin-update")
    parser.add_argument("--spin-seed", type=int)
    parser.add_argument("--spin-off", **switch)
    parser.add_argument("--spin-allow-request-policy", **switch)
    parser.add_argument("--spin-record", metavar="FOLDER")
    parser.add_argument("--spin-record-layers")
    for field in _RECORD_LIMITS:
        parser.add_argument(f"--spin-record-{field}")
    return take_own(parser, argv, "--spin-", "SPIN's")


def read_spin_arguments(argv: Sequence[str]) -> tuple[SpinSettings, list[str]]:
    """Take our arguments out of a command line.

    Returns:
        The settings, and what is left for vLLM.

    Raises:
        InputError: an argument or a policy file that does not make sense.
    """
    ours, rest = take_spin_arguments(argv)
    given = {f: v for f in _POLICY_FIELDS if (v := getattr(ours, f)) is not None}
    settings: dict[str, Any] = {"enabled": not ours.spin_off, "default": given}
    if ours.spin_policies is not None:
        settings["policies"] = _read_policies(ours.spin_policies)
    settings["allow_request_policy"] = ours.spin_allow_request_policy
    record = {f: v for f in _RECORD_LIMITS if (v := getattr(ours, f"spin_record_{f}")) is not None}
    if ours.spin_record_layers is not None:
        record["layers"] = ours.spin_record_layers.split(",")
    if ours.spin_record is not None:
        settings["record"] = {"folder": ours.spin_record, **record}
    elif record:
        raise InputError("--spin-record", "a folder, beside --spin-record-*", "none")
    for name in ("capacity", "places", "min_context", "history", "mask", "update", "seed"):
        if (value := getattr(ours, f"spin_{name}")) is not None:
            settings[name] = value
    if ours.spin_off and ours.spin_record is not None:
        raise InputError("--spin-record", "SPIN to be on, beside it", "--spin-off")
    checked = _validate(settings)
    if len(checked.policies) >= checked.capacity:
        raise InputError(
            "--spin-policies",
            f"fewer policies than --spin-capacity {checked.capacity}",
            len(checked.policies),
        )
    return checked, rest


def _read_policies(path: Path) -> Any:
    found = read_yaml(path, f"--spin-policies {path}")
    if not isinstance(found, dict) or set(found) != {"policies"}:
        raise InputError(f"--spin-policies {path}", "one key, policies", found)
    return found["policies"]


def _validate(settings: dict[str, Any]) -> SpinSettings:
    try:
        checked = SpinSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        expected = first["msg"].removeprefix("Input should be ")
        raise InputError(f"SPIN {where}", expected, repr(first["input"])) from None
    if "default" in checked.policies:
        raise InputError("policy name default", "another name (--spin-* set the default)", "it")
    named: dict[str, PolicySettings] = {"default": checked.default, **checked.policies}
    for name, policy in named.items():
        try:
            policy.policy()
        except InputError as error:
            raise InputError(f"policy {name}, {error.name}", error.expected, error.got) from None
    return checked
