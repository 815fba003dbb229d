"""`sluice gate`: what is printed and written, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from sluice.cli.app import app
from sluice.cli.gate import default_folder, read_ks
from sluice.errors import AnalysisError
from tests.analysis.recordings import DISTANCE, features_of, record, rows_of, some_groups, some_recorded, write


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return write(tmp_path / "groups.jsonl", rows_of(some_groups()))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is tested in its own room; here it would only take time."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)


def test_sweep_prints_tables_and_writes_files(groups: Path, tmp_path: Path) -> None:
    result = run("gate", "sweep", groups, "--k", "2-5", "--threshold", "0.5", "--signal", DISTANCE, "--precision-floor", "0.6")
    assert result.exit_code == 0, result.output
    for title in ("What every signal knows", "The given thresholds", "References at K = 2", "The rule by task type", "smaller groups"):
        assert title in result.stdout
    assert f"{DISTANCE} < 0.5 at K = 2" in result.stdout
    assert {path.name for path in (tmp_path / "gate_report").iterdir()} == {"correlations.csv", "thresholds.csv", "report.json"}
    assert "the plots need the package plotly" in result.stderr


def test_fit_ends_with_the_lines_for_the_recipe(groups: Path, tmp_path: Path) -> None:
    result = run("gate", "fit", groups, "--precision-floor", "0.6", "--out", tmp_path / "out", "--seed", "3", "--cv", "4")
    assert result.exit_code == 0, result.output
    snippet = result.stdout[result.stdout.index("gate:\n") :]
    assert yaml.safe_load(snippet) == yaml.safe_load((tmp_path / "out" / "gate.yaml").read_text())
    assert yaml.safe_load(snippet)["gate"].keys() == {"k", "threshold", "signal"}
    assert "Held out: " in result.stdout
    assert "warning: " in result.stdout


def test_a_run_folder_is_analysed_as_it_is(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", some_groups(n=30))
    result = run("gate", "sweep", folder, "--k", "3", "--signal", DISTANCE)
    assert result.exit_code == 0, result.output
    assert "30 groups of 4" in result.stdout
    assert (folder / "gate_report" / "report.json").is_file()


def test_json_is_one_object_with_the_figures_of_the_tables(groups: Path) -> None:
    printed = run("gate", "fit", groups, "--precision-floor", "0.6", "--format", "json")
    assert printed.exit_code == 0, printed.output
    data = json.loads(printed.stdout)
    assert data["groups"] == 60
    assert data["fit"]["wanted"] == 0.6
    assert data["point"] == data["fit"]["choice"]["point"]
    assert {arm["name"] for arm in data["arms"]} >= {"no gate", "oracle", "gate", "post-hoc filter"}


def test_a_fit_without_a_rule_ends_with_one(tmp_path: Path) -> None:
    mixed = [row | {"reward_var": 0.25} for row in features_of(some_recorded(n=40))]
    result = run("gate", "fit", write(tmp_path / "features.jsonl", mixed))
    assert result.exit_code == 1
    assert "no signal, K and threshold reach a precision of 0.8 with at least 5 cuts" in result.stdout
    assert "For the recipe" not in result.stdout


def test_features_with_nothing_but_an_outcome_are_enough(tmp_path: Path) -> None:
    """No lengths, variances, task types, names or K: what needs them is left out."""
    path = write(tmp_path / "features.csv", [{DISTANCE: i / 20, "zero_variance": i < 8} for i in range(20)])
    result = run("gate", "fit", path, "--k", "10", "--horizon", "30", "--format", "json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["point"]["cut"], data["point"]["precision"], data["point"]["safe_step_saving"]) == (8, 1.0, None)
    assert (data["point"]["advantage_kept"], data["task_types"], data["transfer"]) == (None, [], [])
    assert [one["spearman"] for one in data["correlations"]] == [None]
    assert run("gate", "fit", path, "--k", "10", "--horizon", "30").exit_code == 0


def test_a_sweep_of_very_few_groups_says_so(tmp_path: Path) -> None:
    result = run("gate", "sweep", write(tmp_path / "groups.jsonl", rows_of(some_groups(n=2))), "--k", "3")
    assert result.exit_code == 0, result.output
    assert "of 2 groups have" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep", "gone.csv"), "gone.csv: expected a file that can be read, got: No such file or directory"),
        (("sweep", "GROUPS", "--k", "8"), "k: expected steps from 1 to 7, below the horizon, got 8"),
        (("sweep", "GROUPS", "--k", "ten"), "--k: expected environment steps such as 10, 10,15,20, 5-20 or 5-30:5, got 'ten'"),
        (("sweep", "GROUPS", "--signal", "distance"), "signal: expected some of prefix_edit_distance_mean"),
        (("sweep", "GROUPS", "--horizon", "5"), "horizon: expected at least the longest trajectory"),
        (
            ("sweep", "GROUPS", "--group-size", "8", "--precision-floor", "0.5"),
            "group size: expected from 2 to 3, below the recorded one, got 8",
        ),
        (("fit", "GROUPS", "--cv", "40"), "groups: expected at least two per fold, that is 80, got 60"),
        (("fit", "GROUPS", "--precision-floor", "0"), "precision floor: expected a number > 0 and <= 1, got 0.0"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_two(groups: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("gate", *(groups if argument == "GROUPS" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_steps_may_be_given_in_several_ways() -> None:
    assert read_ks(None) is None
    assert read_ks(["10"]) == [10]
    assert read_ks(["10,15", "5"]) == [5, 10, 15]
    assert read_ks(["5-8"]) == [5, 6, 7, 8]
    assert read_ks(["5-30:10, 7"]) == [5, 7, 15, 25]
    for wrong in ("1-1000000000", "999999999999", "0" + "9" * 5000, "", "0", "-3", "5-", "5:2", "1.5", "8-5"):
        with pytest.raises(AnalysisError, match="--k: expected"):
            read_ks([wrong])


def test_reports_stand_beside_the_recording_where_that_can_be_written(tmp_path: Path) -> None:
    assert default_folder([tmp_path]) == tmp_path / "gate_report"
    assert default_folder([tmp_path / "groups.csv"]) == tmp_path / "gate_report"
    assert default_folder([tmp_path / "gone" / "groups.csv"]) == Path("gate_report")
    assert default_folder([tmp_path, tmp_path]) == Path("gate_report")
