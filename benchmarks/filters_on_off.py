"""The main job with its filters and without: same trainer settings, same number of optimiser steps, several seeds, as a Markdown table.

    python benchmarks/filters_on_off.py [--seeds 1 2 3] [KEY=VALUE ...]

Runs go one after another, with and without filters by turns, so that both see the same machine. Each is an ordinary run folder under
--root, and everything in the table is read from its run.db. Without filters every whole group trains, with zero advantages where its
rewards are equal. Figures are means over the seeds, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sluice.config import load_config
from sluice.records import over_all, read_summary

RECIPE = Path("recipes/rlvr_arithmetic.yaml")


def run(arguments: Sequence[str], root: Path) -> Path:
    """Run the recipe once; its run.db."""
    before = set(root.glob("*/run.db"))
    command = [sys.executable, "-m", "sluice.cli", "train", str(RECIPE), *arguments, f"records.root={root}", "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (run_db,) = set(root.glob("*/run.db")) - before
    return run_db


def figures(run_db: Path) -> dict[str, float]:
    """What the table shows of one run."""
    summary = read_summary(run_db)
    assert summary.before is not None
    assert summary.after is not None
    with sqlite3.connect(run_db) as db:
        (zero_share,) = db.execute("SELECT avg(value) FROM metrics WHERE name = 'batch/zero_advantage_share'").fetchone()
        overhead = json.loads(db.execute("SELECT value FROM run WHERE key = 'overhead_seconds'").fetchone()[0])
    before, after = over_all(summary.before.results.values()).mean, over_all(summary.after.results.values()).mean
    assert before is not None
    assert after is not None
    return {
        "held-out accuracy before, %": 100 * before,
        "held-out accuracy after, %": 100 * after,
        "gain, points": 100 * (after - before),
        "optimiser steps": float(summary.steps),
        "zero-advantage rollouts in the batch, %": 100 * zero_share,
        "tokens generated, thousands": summary.tokens / 1000,
        "tokens per useful group": summary.tokens / summary.useful_groups,
        "useful groups": float(summary.useful_groups),
        "wall-clock, s": summary.seconds,
        "deciding and recording, % of wall-clock": 100 * (sum(overhead.values()) - overhead["run"]) / overhead["run"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--root", type=Path, default=Path("runs/filters_on_off"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for all runs")
    arguments = parser.parse_args()
    domains = load_config(RECIPE, arguments.overrides).rewards
    off = [f"rewards.{domain}.query_filter_config={{type: no_filter}}" for domain in domains]
    rows: dict[str, list[dict[str, float]]] = {"filters on": [], "filters off": []}
    for seed in arguments.seeds:
        for name, settings in (("filters on", []), ("filters off", off)):
            rows[name].append(figures(run([*arguments.overrides, *settings, f"seed={seed}"], arguments.root)))
            print(f"{name}, seed {seed}: " + ", ".join(f"{key} {value:.1f}" for key, value in rows[name][-1].items()), file=sys.stderr)
    print(f"| {len(arguments.seeds)} seeds | " + " | ".join(rows) + " |")
    print("|---|" + "---|" * len(rows))
    for key in rows["filters on"][0]:
        cells = []
        for found in rows.values():
            values = [row[key] for row in found]
            cells.append(f"{statistics.mean(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})")
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
