"""The --spin-* arguments of `spin-server serve`."""

from pathlib import Path

import pytest

from spin_server.cli.spin_arguments import read_spin_arguments
from spin_server.errors import InputError


def test_defaults_are_the_papers_and_the_rest_is_vllms() -> None:
    settings, rest = read_spin_arguments(["--port", "1", "--seed=3", "--no-enable-prefix-caching"])
    assert rest == ["--port", "1", "--seed=3", "--no-enable-prefix-caching"]
    policy = settings.default.policy()
    assert settings.enabled
    assert (str(policy.sparsity), str(policy.exploration)) == ("0.3", "0.05")
    assert (policy.exploration_policy, str(policy.ema_decay)) == ("random", "0.5")
    assert settings.capacity == 1024


def test_given_values_are_kept_exactly() -> None:
    settings, rest = read_spin_arguments(
        [
            *("--spin-sparsity", "0.123456789", "--spin-exploration=0.2"),
            *("--spin-exploration-policy", "block_age", "--spin-ema-decay", "0.9"),
            *("--spin-probe-period", "8", "--spin-seed", "7", "--spin-min-context", "9000"),
            *("--spin-history", "bfloat16"),
            *("--spin-record", "traces", "--spin-record-layers", "1,3", "--spin-record-steps", "9"),
        ]
    )
    policy = settings.default.policy()
    assert rest == []
    assert policy.sparsity.billionths == 123_456_789
    assert (policy.exploration_policy, policy.probe_period) == ("block_age", 8)
    assert (settings.seed, settings.min_context, settings.history) == (7, 9000, "bfloat16")
    assert settings.record is not None
    assert (settings.record.folder, settings.record.layers) == ("traces", [1, 3])
    assert settings.record.steps == 9


def test_policy_file_gives_named_policies_in_order(tmp_path: Path) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text("policies:\n  a: {sparsity: 0.4}\n  b: {sparsity: 0.5, exploration: 0.2}\n")
    settings, _ = read_spin_arguments(["--spin-policies", str(path)])
    assert list(settings.policies) == ["a", "b"]
    assert settings.policies["b"].policy().exploration.billionths == 200_000_000
    assert settings.policies["a"].policy().exploration.billionths == 50_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--spin-sparsity", "1.5"], "policy default, sparsity: expected a number from 0 to 1"),
        (["--spin-ema-decay", "x"], "policy default, ema_decay: expected a number"),
        (["--spin-exploration-policy", "greedy"], "SPIN default.exploration_policy"),
        (["--spin-probe-period", "-1"], "SPIN default.probe_period"),
        (["--spin-capacity", "0"], "SPIN capacity"),
        (["--spin-min-context", "-1"], "SPIN min_context"),
        (["--spin-history", "float16"], "SPIN history"),
        (["--spin-capacity", "many"], "SPIN's arguments"),
        (["--spin-sparsty", "0.3"], "got --spin-sparsty"),
        (["--spin-record-steps", "3"], "--spin-record: expected a folder"),
        (["--spin-record", "x", "--spin-record-layers", "one"], "SPIN record.layers.0"),
        (["--spin-sparsity"], "SPIN's arguments"),
    ],
)
def test_bad_argument_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_spin_arguments(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("policies: [1]", "SPIN policies"),
        ("a: {sparsity: 0.4}", "expected one key, policies"),
        ("- a", "expected one key, policies"),
        ("policies:\n  a: {sparsty: 0.4}", "SPIN policies.a.sparsty"),
        ("policies:\n  a: {sparsity: 4}", "policy a, sparsity: expected a number from 0 to 1"),
        ("policies:\n  a: {sparsity: .nan}", "policy a, sparsity: expected a number"),
        ("policies: {a: {}\n", "expected YAML"),
        ("policies: {default: {}}", "policy name default"),
    ],
)
def test_bad_policy_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_spin_arguments(["--spin-policies", str(path)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_policy_file_and_too_many_policies_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a readable file"):
        read_spin_arguments(["--spin-policies", str(tmp_path / "none.yaml")])
    path = tmp_path / "policies.yaml"
    path.write_text("policies: {a: {}, b: {}}")
    with pytest.raises(InputError, match="fewer policies than --spin-capacity 2"):
        read_spin_arguments(["--spin-policies", str(path), "--spin-capacity", "2"])


def test_off_turns_spin_off() -> None:
    assert not read_spin_arguments(["--spin-off"])[0].enabled
    with pytest.raises(InputError, match="--spin-record: expected SPIN to be on, beside it"):
        read_spin_arguments(["--spin-off", "--spin-record", "traces"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies: {a: {sparsity: true}}", "policies.a.sparsity"),
        ("policies: {a: {probe_period: true}}", "policies.a.probe_period: expected a valid int"),
        ("policies: {a: {probe_period: 99999999999999999999999}}", "policies.a.probe_period"),
        ("policies: {a: {sparsity: .nan}}", "policy a, sparsity"),
        ("policies: {'': {}}", "policies..*match pattern"),
        ("policies: {a: {}, a: {}}", "the key 'a' comes twice"),
        ("policies: {a: {sparsity: 0.1, sparsity: 0.2}}", "the key 'sparsity' comes twice"),
        ("policies: {2024-13-45: {}}", "expected YAML"),
        ("policies: " + "[" * 3000, "expected YAML"),
    ],
)
def test_policy_file_that_makes_no_sense_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_spin_arguments(["--spin-policies", str(path)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--spin-record", ""],
        ["--spin-capacity", "99999999"],
        ["--spin-probe-period", "often"],
        ["--spin-probe-period", "-1"],
    ],
)
def test_argument_that_makes_no_sense_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InputError):
        read_spin_arguments(arguments)
