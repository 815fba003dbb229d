"""The room that does what the machine decides: an asynchronous shell around engine, verifiers, task source and journal.

    shell.py        LocalShell: plays the machine's instructions on one asyncio loop, in this process
    loops.py        user-defined rollout loops and the context they work with
    member.py       a generation and its score become a rollout
    validation.py   held-out evaluation: every item, no filter, no refill
    clock.py        a virtual clock for tests: an event loop whose time jumps

Another player (a cluster, a simulator) takes the same instructions and tells the same events; nothing here decides.
"""

from sluice.execution.loops import (
    Attempt,
    AttemptFailed,
    GroupClosed,
    Judged,
    LoopContext,
    RolloutLoop,
    RoundsUsedUp,
    TokensUsedUp,
    load_loop,
)
from sluice.execution.shell import Journal, LocalShell, TaskSource
from sluice.execution.validation import ValidationResult, validate

__all__ = [
    "Attempt",
    "AttemptFailed",
    "GroupClosed",
    "Journal",
    "Judged",
    "LocalShell",
    "LoopContext",
    "RolloutLoop",
    "RoundsUsedUp",
    "TaskSource",
    "TokensUsedUp",
    "ValidationResult",
    "load_loop",
    "validate",
]
