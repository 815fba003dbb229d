"""The commands. Everything heavy is imported when a command runs, so that help and completion answer at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sluice
from sluice.cli.reporting import FAILED, STOPPED, reported, unless_nobody_reads

if TYPE_CHECKING:
    from sluice.cli.doctor import Check

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
    recipe: Recipe,
    overrides: Overrides = None,
    seed: Seed = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line per step instead of a live display, as without a terminal.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and the result only.")] = False,
) -> None:
    """Run a recipe: sample, filter, refill and train.

    Everything the run decides is written to a new folder under `records.root` (default `runs/`), which is printed at the end.
    Ctrl-C stops it in bounded time with everything saved; a second Ctrl-C stops it at once.

    Example: `sluice train recipes/rlvr_arithmetic.yaml seed=1 trainer.max_steps=20`

    Exit codes: 0 done, 1 the run failed, 2 the recipe or its data are wrong, 130 stopped by Ctrl-C.
    """
    with reported():
        from sluice.config import load_config

        config = load_config(recipe, _with_seed(overrides, seed))

        from sluice.cli.progress import ProgressDisplay
        from sluice.cli.quiet import QuietDisplay
        from sluice.pipeline.rlvr import train as run
        from sluice.records import read_summary, summary_lines

        display = QuietDisplay() if quiet else ProgressDisplay(config.exp_name, live=False if plain else None)
        with display:
            result = run(config, config_path=recipe, display=display)
        lines = summary_lines(read_summary(result.folder / "run.db"))
        with unless_nobody_reads():
            for line in lines:
                typer.echo(line)
        if result.interrupted:
            raise typer.Exit(STOPPED)


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
