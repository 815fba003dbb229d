"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sluice.config import parse_config
from sluice.config.models import VerifierConfig
from sluice.filters import build_domain_filters, build_query_filter, build_response_filter
from sluice.pipeline.rlvr import scheduler_config
from sluice.rewards import build_verifier, check_rewards
from tests.fakes import make_group, make_rollout, make_task

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_configuration_shown_is_accepted_with_its_filters_and_verifiers(tmp_path: Path) -> None:
    config = parse_config(yaml.safe_load(block("yaml")), folder=tmp_path)
    check_rewards(config.rewards)
    assert set(build_domain_filters(config.rewards, config.num_return_sequences_in_group)) == {"math", "sums"}


def test_the_settings_for_asynchronous_training_shown_fit_the_configuration_shown(tmp_path: Path) -> None:
    first, second = (yaml.safe_load(found) for found in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
    resampling = first["resampling"] | second.pop("resampling")
    config = parse_config(first | second | {"resampling": resampling}, folder=tmp_path)
    assert scheduler_config(config).is_async


def test_the_library_example_gives_what_its_comments_say() -> None:
    names: dict[str, object] = {}
    exec(block("python"), names)
    verdict = names["verdict"]
    assert (verdict.keep, verdict.reason) == (True, "kept")  # type: ignore[attr-defined]
    keep_informative = names["keep_informative"]
    assert keep_informative.judge([0.1, 0.1, 0.1]).reason == "no_spread"  # type: ignore[attr-defined]
    assert list(names["advantages"])[-2:] == [0.0, 0.0]  # type: ignore[call-overload]


def test_the_own_filters_and_verifier_shown_work_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(block("py"))
    monkeypatch.syspath_prepend(tmp_path)
    spread = build_query_filter({"type": "my_rules.spread", "filter_args": {"least": 0.5}})
    assert spread.judge(make_group([1.0, 0.0])).keep
    dropped = spread.judge(make_group([1.0, 0.9]))
    assert (dropped.category, dropped.reason) == ("low_information", "spread")
    short = build_response_filter({"type": "my_rules.short", "filter_args": {"most": 1}})
    assert short.judge(make_rollout(tokens=2)).reason == "short"
    close = build_verifier(VerifierConfig(type="my_rules.close"))
    assert close(make_task(), " 1 ") == 1.0
    both = {"type": "all", "filter_args": {"filters": [{"type": "std_filter"}, {"type": "my_rules.spread"}]}}
    assert build_query_filter(both).judge(make_group([1.0, 0.0])).keep


def test_every_figure_is_filled_in() -> None:
    assert "@@" not in README


def test_both_commands_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in ("train", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
