"""The gate decides while a group runs: members that have not parted after K environment steps are on their way to one reward, and are cut.

It knows nothing of environments, tokens or engines: it is told what members did, and answers with a `Verdict`. Source of the idea: arXiv
2605.05802.

- `values.py`: what actions, observations and the numbers beside them must be
- `divergence.py`: seven signals of how far members have parted, of a whole group or as steps arrive
- `rules.py`: from signals to the question whether a group is cut; the table from `type` to rule; `build_rule`
- `decision.py`: `Gate`, one decision on one group
- `keeper.py`: `GateKeeper`, which watches running groups, decides on each once, and audits itself
- `futility.py`: `FutilityKeeper`, which stops single trajectories that get nowhere, and audits itself
- `audit.py`: how often it is right, how far the threshold may go, what it saves
- `offline.py`: the same questions on recorded groups

A rule that looks at a group again and again, fitted on finished groups (docs/gate_beyond.md):

- `traces.py`: what a running trajectory and a running group have shown, as numbers
- `played.py`: finished groups, step by step
- `boosting.py`, `calibration.py`: trees in plain numpy; from their scores to chances and to lower bounds of being right
- `learned.py`, `fitting.py`: the rule, its file, its futility stop; how it is fitted
- `exact.py`: members that are certain to end alike
- `sequential.py`: `SequentialKeeper`, which cuts running groups with it, and audits itself (`self_audit.py`)

To add a rule: a frozen dataclass with `reads` and `margin` in `rules.py` and its class in the table there. To add a signal: its name in
`SIGNALS`, its line in `encoded_signals`, and its definition in the tests.
"""

from __future__ import annotations

from sluice.gate.audit import Precision, clopper_pearson
from sluice.gate.decision import Gate
from sluice.gate.divergence import SIGNALS, PrefixSignals, signals
from sluice.gate.exact import ExactStop
from sluice.gate.fitting import fit_learned
from sluice.gate.futility import FutilityKeeper, FutilityRule
from sluice.gate.keeper import GateKeeper
from sluice.gate.learned import LearnedFutility, LearnedRule
from sluice.gate.rules import ByTaskType, OrTermination, Rule, SingleAxis, build_rule
from sluice.gate.sequential import SequentialKeeper

__all__ = [
    "SIGNALS",
    "ByTaskType",
    "ExactStop",
    "FutilityKeeper",
    "FutilityRule",
    "Gate",
    "GateKeeper",
    "LearnedFutility",
    "LearnedRule",
    "OrTermination",
    "Precision",
    "PrefixSignals",
    "Rule",
    "SequentialKeeper",
    "SingleAxis",
    "build_rule",
    "clopper_pearson",
    "fit_learned",
    "signals",
]
