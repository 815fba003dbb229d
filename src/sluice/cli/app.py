"""The commands. Everything heavy is imported when a command runs, so that help and completion answer at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sluice
from sluice.cli.correction import correction_app
from sluice.cli.gate import gate_app
from sluice.cli.reporting import FAILED, STOPPED, reported, unless_nobody_reads
from sluice.cli.simulate import simulate
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.cli.doctor import Check
    from sluice.cli.progress import ProgressDisplay
    from sluice.cli.quiet import QuietDisplay
    from sluice.pipeline.train import RunResult

app = typer.Typer(
    name="sluice",
    help="Decide which LLM rollouts deserve training: sample groups, filter them, refill the batch, train, and account for every token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings put over the file's, such as `trainer.max_steps=20`. Values are YAML, and a number picks an entry of a list: "
        "`tasks.train.0.size=10`.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Short for `seed=N`.", show_default=False)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sluice {sluice.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="The YAML file of the run.", show_default=False)] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with the run in this folder.", show_default=False)
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Keep every judged group with all its members. Short for `records.rollouts=true`.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line per step instead of a live display, as without a terminal.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and the result only.")] = False,
) -> None:
    """Run a recipe: sample, filter, refill and train.

    Everything the run decides is written to a new folder under `records.root` (default `runs/`), which is printed at the end.
    Ctrl-C stops it in bounded time with everything saved; a second Ctrl-C stops it at once.

    `--resume RUN` takes up a run that was stopped, failed or was killed, from its newest whole checkpoint: no recipe is given then, and
    only few settings may be changed.

    Example: `sluice train recipes/rlvr_arithmetic.yaml seed=1 trainer.max_steps=20`

    Example: `sluice train --resume runs/RUN`

    Exit codes: 0 done, 1 the run failed, 2 the recipe or its data are wrong, 130 stopped by Ctrl-C.
    """
    with reported():
        from sluice.records import read_summary, summary_lines

        if record:
            if resume:
                raise ConfigError(
                    "--record is for a new run: a resumed one records its rollouts if it did so from the beginning - leave it away"
                )
            overrides = [*(overrides or []), "records.rollouts=true"]
        result = _resume(resume, recipe, overrides, seed, plain, quiet) if resume else _train(recipe, overrides, seed, plain, quiet)
        lines = summary_lines(read_summary(result.folder / "run.db"))
        with unless_nobody_reads():
            for line in lines:
                typer.echo(line)
        if result.interrupted:
            raise typer.Exit(STOPPED)


def _display(name: str, plain: bool, quiet: bool) -> ProgressDisplay | QuietDisplay:
    from sluice.cli.progress import ProgressDisplay
    from sluice.cli.quiet import QuietDisplay

    return QuietDisplay() if quiet else ProgressDisplay(name, live=False if plain else None)


def _train(recipe: Path | None, overrides: list[str] | None, seed: int | None, plain: bool, quiet: bool) -> RunResult:
    if recipe is None:
        raise ConfigError("expected the YAML file of a run, got none - sluice train RECIPE, or sluice train --resume RUN")
    from sluice.config import load_config

    config = load_config(recipe, _with_seed(overrides, seed))
    with _display(config.exp_name, plain, quiet) as display:
        from sluice.pipeline.train import train as run

        return run(config, config_path=recipe, display=display)


def _resume(folder: Path, recipe: Path | None, overrides: list[str] | None, seed: int | None, plain: bool, quiet: bool) -> RunResult:
    changes = [*([] if recipe is None else [str(recipe)]), *_with_seed(overrides, seed)]  # the first positional argument is a change here
    wrong = [change for change in changes if "=" not in change]
    if wrong:
        raise ConfigError(f"--resume takes no recipe, only settings to change (KEY=VALUE), got {wrong[0]} - the run folder has its recipe")
    with _display(folder.name, plain, quiet) as display:
        from sluice.pipeline.train import resume as run

        return run(folder, overrides=changes, display=display)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, as `sluice train` prints it.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show how a run is doing: what it waits for, what is in flight, what the filters drop, and how to go on when it is dead.

    Works while the run goes on, after its end and after a kill, and disturbs nothing. Ages are as of now, or as of the death of the run.

    Exit codes: 0 shown, 1 there is no run.
    """
    with reported():
        from sluice.cli.status import show_status

        with unless_nobody_reads():
            show_status(run, as_json=as_json)


@app.command()
def doctor(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="The YAML file of a run.", show_default=False)] = None,
    overrides: Overrides = None,
    seed: Seed = None,
) -> None:
    """Check this machine, and a recipe from its keys to one group that is sampled, scored and judged.

    Each line is ok, a warning or a problem, and says what to do. Nothing is trained and nothing is kept.

    Exit codes: 0 no problem, 1 a problem.
    """
    with reported():
        from sluice.cli.doctor import show_all

        is_well = True
        with unless_nobody_reads():
            is_well = show_all(_checks(recipe, _with_seed(overrides, seed)))
        if not is_well:
            raise typer.Exit(FAILED)


def _checks(recipe: Path | None, overrides: list[str]) -> Iterator[Check]:
    from sluice.cli.environment import environment_checks
    from sluice.cli.recipe import read_recipe, recipe_checks

    if recipe is None:
        yield from environment_checks(Path("runs"))
        return
    config, answer = read_recipe(recipe, overrides)
    yield from environment_checks(config.records.root if config is not None else Path("runs"))
    yield answer
    if config is not None:
        yield from recipe_checks(config)


def _with_seed(overrides: list[str] | None, seed: int | None) -> list[str]:
    return [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]


app.command()(simulate)
app.add_typer(gate_app)
app.add_typer(correction_app)
