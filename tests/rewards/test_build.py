from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sluice.config.models import RewardConfig, VerifierConfig
from sluice.errors import ConfigError
from sluice.rewards import VERIFIERS, build_verifier, check_rewards, check_verifier
from tests.rewards.examples import HERE, rewards, task, verifier


def problem(config: VerifierConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_verifier(config, "rewards.math.verifier")
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_every_name_in_the_table_can_be_built_and_called_by_its_configuration(name: str):
    args = {"pattern": "(?P<answer>.*)"} if name == "regex" else {}
    config = verifier(name, **args)
    check_verifier(config, "rewards.math.verifier")
    row = {"answer": "42", "metadata": {"source_dataset": "basic_arithmetic"}}
    assert build_verifier(config)(task("42", entry=row), "42") == 1.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("math_verfy", {}, "rewards.math.verifier.type: expected the name of a verifier or an import path 'package.module.name', got 'math_verfy' (text) - did you mean math_verify?"),  # noqa: E501
        ("zzz", {}, "valid: exact, math_verify, numeric, reasoning_gym, regex"),
        ("exact", {"ignore_cse": True}, "rewards.math.verifier.args.ignore_cse: the verifier 'exact' has no such argument - did you mean ignore_case?"),  # noqa: E501
        ("exact", {"strip": "perhaps"}, "rewards.math.verifier.args.strip: input should be a valid boolean"),
        ("numeric", {"abs_tolerance": -1}, "rewards.math.verifier.args.abs_tolerance: input should be greater than or equal to 0, got -1"),
        ("numeric", {"rel_tolerance": float("nan")}, "rewards.math.verifier.args.rel_tolerance"),
        ("numeric", {"which": "first"}, "rewards.math.verifier.args.which: input should be 'last' or 'only', got 'first'"),
        ("regex", {}, "rewards.math.verifier.args.pattern: the verifier 'regex' needs this argument"),
        ("regex", {"pattern": "("}, "rewards.math.verifier.args.pattern: expected a regular expression, got '('"),
        ("regex", {"pattern": "a", "ignore_case": True}, "rewards.math.verifier.args.ignore_case: has no effect"),
        ("reasoning_gym", {"params": {"basic_arithmetc": {}}}, "rewards.math.verifier.args.params.basic_arithmetc: expected a data set of reasoning-gym, there is none of that name - did you mean basic_arithmetic?"),  # noqa: E501
        ("reasoning_gym", {"params": {"basic_arithmetic": {"tems": 1}}}, "args.params.basic_arithmetic: expected parameters"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_built_in_verifier_names_its_key_and_the_nearest_valid_one(name: str, args: dict[str, Any], message: str):
    assert message in problem(verifier(name, **args))


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("tests.rewards.no_such_file.f", {}, "rewards.math.verifier.type: expected an import path, there is no module 'tests.rewards.no_such_file'"),  # noqa: E501
        ("no_such_package.f", {}, "there is no module 'no_such_package'"),
        (f"{HERE}.rihgt", {}, f"rewards.math.verifier.type: the module '{HERE}' has no 'rihgt' - did you mean right?"),
        (f"{HERE}.NUMBER", {}, "expected a function or a class"),
        (f"{HERE}.takes_one", {}, f"expected something that is called with (task, response), '{HERE}.takes_one' is"),
        (f"{HERE}.asynchronous", {}, "is async"),
        (f"{HERE}.NotCallable", {}, "has no __call__"),
        (f"{HERE}.Counting", {}, "rewards.math.verifier.args: expected the arguments of"),
        (f"{HERE}.Counting", {"start": 0, "stop": 1}, "got an unexpected keyword argument 'stop'"),
        (f"{HERE}.takes_options", {"bonsu": 1}, "rewards.math.verifier.args: expected the arguments of"),
        (f"{HERE}.right", {"bonus": 1}, "rewards.math.verifier.args: expected the arguments of"),
        ("__main__.f", {}, "put the verifier into a file of its own"),
        ("tests.rewards.breaks_on_import.f", {}, "RuntimeError: no licence file"),
        ("tests..f", {}, "expected the name of a verifier or an import path"),
    ],
)  # fmt: skip
def test_a_wrong_import_path_signature_or_argument_fails_with_its_key(path: str, args: dict[str, Any], message: str):
    assert message in problem(VerifierConfig(type=path, args=args))


def test_functions_and_classes_of_the_user_are_built_with_their_arguments():
    assert build_verifier(verifier(".right"))(task("42"), "42") == 1.0
    assert build_verifier(verifier(".takes_options", bonus=0.5))(task(), "") == 1.5
    counting = build_verifier(verifier(".Counting", start=5))
    assert [counting(task(), ""), counting(task(), "")] == [6.0, 7.0]


def test_all_that_is_wrong_with_a_domain_is_told_at_once():
    wrong = rewards("exact", {"ignore_cse": True}, reward_key="acc")
    with pytest.raises(ConfigError) as caught:
        check_rewards(wrong)
    text = str(caught.value)
    assert "rewards.math.verifier.args.ignore_cse: " in text
    assert "rewards.math.reward_key: has no effect" in text


def test_checking_the_built_in_verifiers_imports_none_of_their_packages():
    code = (
        "import sys\n"
        "from sluice.config.models import VerifierConfig\n"
        "from sluice.rewards import check_verifier\n"
        "for name in ('math_verify', 'reasoning_gym'):\n"
        "    check_verifier(VerifierConfig(type=name), 'rewards.math.verifier')\n"
        "heavy = {'torch', 'math_verify', 'sympy', 'reasoning_gym'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_verifier_whose_package_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VERIFIERS["math_verify"], "package", "no_such_math")
    assert "rewards.math.verifier.type: the verifier 'math_verify' needs the package no-such-math - install" in problem(
        verifier("math_verify")
    )


def test_a_reward_key_may_be_set_for_a_verifier_of_the_user():
    check_rewards({"math": RewardConfig(verifier=verifier(".mapping"), reward_key="acc")})
