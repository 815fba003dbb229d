"""The gate decides while a group runs: members that have not parted after K environment steps are on their way to one reward, and are cut.

It knows nothing of environments, tokens or engines: it is told what members did, and answers with a `Verdict`. Source of the idea: arXiv
2605.05802.

- `divergence.py`: seven signals of how far members have parted, of a whole group or as steps arrive
- `rules.py`: from signals to the question whether a group is cut; the table from `type` to rule; `build_rule`
- `decision.py`: `Gate`, one decision on one group
- `keeper.py`: `GateKeeper`, which watches running groups, decides on each once, and audits itself
- `futility.py`: `FutilityKeeper`, which stops single trajectories that get nowhere, and audits itself
- `audit.py`: how often it is right, how far the threshold may go, what it saves
- `offline.py`: the same questions on recorded groups

To add a rule: a frozen dataclass with `reads` and `margin` in `rules.py` and its class in the table there. To add a signal: its name in
`SIGNALS`, its line in `_measure`, and its definition in the tests.
"""

from __future__ import annotations

from sluice.gate.audit import Precision, clopper_pearson
from sluice.gate.decision import Gate
from sluice.gate.divergence import SIGNALS, PrefixSignals, signals
from sluice.gate.futility import FutilityKeeper, FutilityRule
from sluice.gate.keeper import GateKeeper
from sluice.gate.rules import ByTaskType, OrTermination, Rule, SingleAxis, build_rule

__all__ = [
    "SIGNALS",
    "ByTaskType",
    "FutilityKeeper",
    "FutilityRule",
    "Gate",
    "GateKeeper",
    "OrTermination",
    "Precision",
    "PrefixSignals",
    "Rule",
    "SingleAxis",
    "build_rule",
    "clopper_pearson",
    "signals",
]
