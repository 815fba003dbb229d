"""The main job at several asynchronous generation ratios: same seeds, same trainer settings, same number of steps, as a Markdown table.

    python benchmarks/async_ratio.py [--seeds 1 2] [--ratios 0 0.5 1 2] [KEY=VALUE ...]

Runs go one after another, the ratios by turns, so that all see the same machine. Everything in the table is read from the run.db of
ordinary run folders under --root. Figures are means over the seeds, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
from pathlib import Path

from filters_on_off import figures as common_figures
from filters_on_off import run

SHOWN = ("held-out accuracy before, %", "held-out accuracy after, %", "tokens generated, thousands", "wall-clock, s")


def figures(run_db: Path) -> dict[str, float]:
    """What the table shows of one run."""
    common = common_figures(run_db)

    def metric(query: str, name: str) -> float:
        with sqlite3.connect(run_db) as db:
            (value,) = db.execute(f"SELECT {query} FROM metrics WHERE name = ?", (name,)).fetchone()
        return float(value or 0.0)

    with sqlite3.connect(run_db) as db:
        (expired,) = db.execute("SELECT count(*) FROM groups WHERE outcome = 'expired'").fetchone()
    return {
        "off-policy ratio (mean age of a batch, steps)": metric("avg(value)", "scheduler/off_policy_ratio"),
        "oldest group trained, steps": metric("max(value)", "scheduler/off_policy_max"),
        **{name: common[name] for name in SHOWN},
        "groups expired": float(expired),
        "waiting for batches, s": metric("sum(value)", "actor/wait_seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0])
    parser.add_argument("--root", type=Path, default=Path("runs/async_ratio"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for all runs")
    arguments = parser.parse_args()
    rows: dict[float, list[dict[str, float]]] = {ratio: [] for ratio in arguments.ratios}
    for seed in arguments.seeds:
        for ratio, found in rows.items():
            settings = [*arguments.overrides, f"async_generation_ratio={ratio:g}", f"seed={seed}"]
            found.append(figures(run(settings, arguments.root)))
            print(f"ratio {ratio:g}, seed {seed}: " + ", ".join(f"{key} {value:.2f}" for key, value in found[-1].items()), file=sys.stderr)
    print(f"| async_generation_ratio, {len(arguments.seeds)} seeds | " + " | ".join(f"{ratio:g}" for ratio in rows) + " |")
    print("|---|" + "---|" * len(rows))
    for key in next(iter(rows.values()))[0]:
        cells = []
        for found in rows.values():
            values = [row[key] for row in found]
            cells.append(f"{statistics.mean(values):,.2f} ({min(values):,.2f} to {max(values):,.2f})")
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
