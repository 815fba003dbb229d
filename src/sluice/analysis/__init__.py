"""Answers what-if questions on recorded rollouts, offline: would the gate pay, with which rule, and how sure is that.

Reading
- `reading.py`: the one door: what a path holds is seen, and read
- `tables.py`: CSV, JSONL and Parquet as columns; every cell knows its file and line
- `from_runs.py`, `from_tables.py`, `collecting.py`: action sequences, from runs and from files, and what makes a whole group
- `features.py`: files of group features

Data
- `trajectories.py`: whole groups as arrays; `prefixes.py`: their signals at many K at once
- `recorded.py`: the same groups as they stood at several K: what everything below works on

Figures
- `curves.py`: every threshold of a signal at once, and what a choice of cuts comes to
- `intervals.py`: bootstrap; `references.py`: no gate, random cuts, oracle, post-hoc filter; `transfer.py`: groups of another size
- `fit.py`: a rule under a precision floor, by cross-validation; `doubts.py`: when not to trust it
- `experiments.py`: runs with and without a gate, side by side and training by training

Reports
- `sweep.py`: all of it together, as a `GateReport`
- `report_files.py`: tables and the lines of a recipe as files; `page.py`: the plots as one HTML file

To add a form of recording: a file that makes `TrajectoryGroup`s or a `Recorded`, and its line in `reading.py`. To add a figure: a
function of a `Recorded`, and a field of `GateReport` that `sweep.py` fills.
"""

from __future__ import annotations

from sluice.analysis.experiments import SideBySide, Training, compare_side_by_side, compare_trainings
from sluice.analysis.fit import Fit, fit
from sluice.analysis.reading import Recording, read_recording
from sluice.analysis.recorded import Recorded
from sluice.analysis.sweep import GateReport, Settings, analyse
from sluice.analysis.trajectories import Member, Trajectories, TrajectoryGroup

__all__ = [
    "Fit",
    "GateReport",
    "Member",
    "Recorded",
    "Recording",
    "Settings",
    "SideBySide",
    "Training",
    "Trajectories",
    "TrajectoryGroup",
    "analyse",
    "compare_side_by_side",
    "compare_trainings",
    "fit",
    "read_recording",
]
