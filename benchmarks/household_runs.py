"""The household recipe with several settings and seeds: learning curves, tokens and time, as a Markdown table and a plot.

    python benchmarks/household_runs.py                                    # the recipe as it is, seeds 42, 1 and 2
    python benchmarks/household_runs.py --arm "as it is:" --arm "every group:train_env_manager.group_filter_config={type: no_filter}"

An arm is a name and settings put over the recipe, separated by spaces; all other settings, and the seeds, are the same in all arms. Runs go
one after another, the arms by turns, so that all see the same machine. Each is an ordinary run folder under --root/ARM/; one that is there
already, finished and with the same settings, is read and not run again. Everything in the table is read from run.db. Means over the seeds
with their 95 % t-interval; with one seed the figure alone.
"""

from __future__ import annotations

import argparse
import math
import re
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.config import load_config
from sluice.records import over_all, read_summary

RECIPE = Path("recipes/agentic_household.yaml")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Two-sided 95 % quantiles of Student's t by the number of values."""


@dataclass(frozen=True)
class Run:
    """One run: its held-out curve, and its figures."""

    curve: Mapping[int, float]  # optimiser steps -> held-out success, %
    figures: Mapping[str, float]


def find(folder: Path, settings: Mapping[str, object]) -> Path | None:
    """The run.db of a finished run with these settings, in one of the folders of an arm."""
    for run_db in sorted(folder.glob("*/run.db")):
        kept = load_config(run_db.parent / "config.yaml", []).model_dump(mode="json")  # settings newer than the run get their defaults
        summary = read_summary(run_db)
        if _but_place(kept) == _but_place(settings) and summary.status == "finished":
            return run_db
    return None


def _but_place(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings without where a run is kept and whether its rollouts are."""
    return {name: value for name, value in settings.items() if name not in {"records", "exp_name"}}


def play(arm: str, settings: Sequence[str], seed: int, root: Path) -> Path:
    """The run.db of one run, which is run now unless it is there."""
    folder = root / re.sub(r"\W+", "_", arm).strip("_")
    wanted = [*settings, f"seed={seed}"]
    config = load_config(RECIPE, wanted).model_dump(mode="json")
    if (found := find(folder, config)) is None:
        command = [sys.executable, "-m", "sluice.cli", "train", str(RECIPE), *wanted, f"records.root={folder}", "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = find(folder, config)
    assert found is not None, f"expected a finished run with {wanted} in {folder}"
    return found


def read(run_db: Path) -> Run:
    """What is shown of a run."""
    summary = read_summary(run_db)
    with sqlite3.connect(run_db) as db:
        curve = {
            step: 100 * total / scored
            for step, total, scored in db.execute(
                "SELECT step, sum(reward_sum), sum(scored) FROM validation GROUP BY evaluation ORDER BY step"
            )
        }
        metric = lambda query, name: db.execute(f"SELECT {query} FROM metrics WHERE name = ?", (name,)).fetchone()[0] or 0.0  # noqa: E731
        env_steps = db.execute("SELECT sum(env_steps) FROM groups").fetchone()[0]
        full, batches = db.execute("SELECT sum(kept = requested), count(*) FROM batches").fetchone()
        gap = metric("max(value)", "actor/logprob_gap_max")
        age = metric("avg(value)", "scheduler/off_policy_ratio")
        expired = db.execute("SELECT count(*) FROM groups WHERE outcome = 'expired'").fetchone()[0]
    assert summary.before is not None
    assert summary.after is not None
    before, after = (over_all(one.results.values()).mean for one in (summary.before, summary.after))
    assert before is not None
    assert after is not None
    assert summary.tokens == summary.engine_tokens, f"{run_db}: the ledger has {summary.tokens} tokens, the engine {summary.engine_tokens}"
    late = [value for step, value in curve.items() if step > summary.steps / 3]
    return Run(
        curve,
        {
            "held-out success at the start, %": 100 * before,
            "held-out success at the end, %": 100 * after,
            "gain, points": 100 * (after - before),
            "lowest evaluation after the first third, points over the start": min(late) - 100 * before,
            "full batches, %": 100 * full / batches,
            "tokens generated, thousands": summary.tokens / 1000,
            "tokens per useful group": summary.tokens / summary.useful_groups,
            "environment steps, thousands": env_steps / 1000,
            "environment steps per useful group": env_steps / summary.useful_groups,
            "mean age of a batch, steps": age,
            "groups expired": expired,
            "largest difference of trainer and engine log-probs": gap,
            "wall-clock, minutes": summary.seconds / 60,
        },
    )


def shown(values: Sequence[float]) -> str:
    """Mean and interval."""
    digits = 0 if max(values) >= 1000 else 1 if max(values) >= 0.1 or not any(values) else 6
    mean = f"{statistics.mean(values):,.{digits}f}"
    if len(values) == 1 or len(set(values)) == 1:
        return mean
    return f"{mean} ± {T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)):,.{digits}f}"


def table(arms: Mapping[str, Sequence[Run]]) -> str:
    """Markdown."""
    seeds = len(next(iter(arms.values())))
    lines = [f"| {seeds} seed{'s' if seeds > 1 else ''} | " + " | ".join(arms) + " |", "|---|" + "---|" * len(arms)]
    steps = sorted({step for runs in arms.values() for run in runs for step in run.curve})
    for step in steps[1:-1]:
        cells = [shown(values) if (values := [run.curve[step] for run in runs if step in run.curve]) else "" for runs in arms.values()]
        lines.append(f"| after {step} steps, % | " + " | ".join(cells) + " |")
    names = [*next(iter(arms.values()))[0].figures]
    rows = [f"| {name} | " + " | ".join(shown([run.figures[name] for run in runs]) for runs in arms.values()) + " |" for name in names]
    return "\n".join([lines[0], lines[1], rows[0], *lines[2:], *rows[1:]])


def plot(arms: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Every run thin, the mean of an arm thick."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (arm, runs) in enumerate(arms.items()):
        for run in runs:
            axes.plot([*run.curve], [*run.curve.values()], color=f"C{number}", alpha=0.35, linewidth=1)
        steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
        axes.plot(steps, [statistics.mean(run.curve[step] for run in runs) for step in steps], color=f"C{number}", linewidth=2.5, label=arm)
    axes.set(xlabel="optimiser steps", ylabel="held-out success, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    if len(arms) > 1:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--arm", action="append", metavar="NAME:SETTINGS", help="once for each arm; default: the recipe as it is")
    parser.add_argument("--root", type=Path, default=Path("runs/household"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg or .png, drawn by matplotlib")
    asked = parser.parse_args(arguments)
    wanted = {}
    for text in asked.arm or ["recipe:"]:
        name, _, settings = text.partition(":")
        wanted[name] = re.findall(r"[\w.]+=(?:\{.*?\}(?=\s|$)|\S+)", settings)
    arms: dict[str, list[Run]] = {name: [] for name in wanted}
    for seed in asked.seeds:
        for name, settings in wanted.items():
            arms[name].append(read(play(name, settings, seed, asked.root)))
            curve = ", ".join(f"{step}: {value:.1f}" for step, value in arms[name][-1].curve.items())
            print(f"{name}, seed {seed}: {curve}", file=sys.stderr, flush=True)
    print(table(arms))
    if asked.plot:
        plot(arms, asked.plot)


if __name__ == "__main__":
    main()
