"""`sluice gate learn`: fits the rule that looks at a group again and again, and writes it to a file for `gate.model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.reporting import reported, unless_nobody_reads
from sluice.errors import AnalysisError

if TYPE_CHECKING:
    from sluice.gate.learned import LearnedRule


def learn(
    recorded: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders (`sluice train --record`).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the rule is written.")] = Path("gate_model.json"),
    horizon: Annotated[
        int | None,
        typer.Option("--horizon", min=2, help="Most environment steps of a trajectory. Default: the longest recorded.", show_default=False),
    ] = None,
    futility_floor: Annotated[
        float | None,
        typer.Option(
            "--futility-floor", min=0.0, max=1.0, help="The floor of the futility stop beside it. Default: without.", show_default=False
        ),
    ] = None,
    folds: Annotated[int, typer.Option("--cv", min=2, help="Folds of the cross-fitting.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of folds and trees.")] = 0,
) -> None:
    """Fit a rule that tells after every step how likely a group is to end with equal rewards, and a member to earn nothing more.

    It is fitted on groups that ran to their end, by what recordings hold of every step: action, reply, log-prob, and where the environment
    tells them whether the action was admissible, and progress.

    Example: `sluice gate learn runs/RUN --futility-floor 0.95 --out gate_model.json`

    Exit codes: 0 written, 2 the recording or an option is wrong.
    """
    with reported():
        from sluice.analysis.learning import learn_rule

        rule = learn_rule(recorded, horizon=horizon, futility_floor=futility_floor, folds=folds, seed=seed)
        try:
            rule.save(out)
        except OSError as error:
            raise AnalysisError(f"--out: expected a file that can be written, got {out}: {error.strerror} - choose another") from None
        with unless_nobody_reads():
            typer.echo(as_text(rule, out))


def as_text(rule: LearnedRule, out: Path) -> str:
    """What was fitted, and what it would have done on groups that its models had not seen."""
    facts = rule.provenance
    once = "" if rule.futility_floor is None else f" once members are stopped at the floor {rule.futility_floor:g}"
    lines = [
        f"fitted on {facts['groups']} groups of {rule.group_size}, {facts['equal_groups']} of them with equal rewards{once}",
        f"horizon {rule.horizon}, inputs {', '.join(rule.inputs)}",
        "",
        "on groups that its models had not seen:",
        f"{'':8}{'floor':>7}{'decisions':>11}{'right':>8}{'steps saved':>13}",
        *_rows(facts["cross_fitted"]),
        "",
        f"highest floor that it clears: {rule.member_calibration.most:.3f} for stops, {rule.group_calibration.most:.3f} for cuts",
        f"written to {out}",
    ]
    return "\n".join(lines)


def _rows(outcomes: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for one in outcomes:
        share = f"{100 * one['right'] / one['decisions']:.1f} %" if one["decisions"] else ""
        rows.append(f"{one['what']:8}{one['floor']:>7}{one['decisions']:>11}{share:>8}{100 * one['saved']:>11.1f} %")
    return rows
