"""The room that does what the machine decides: an asynchronous shell around engine, verifiers, task source and journal.

    shell.py                  LocalShell: plays the machine's instructions on one asyncio loop, in this process
    players.py                what plays members for the shell, and the count of what comes late
    responses.py              the player of single responses
    member.py                 a generation and its score become a rollout
    loops.py                  user-defined rollout loops and the context they work with
    validation.py             held-out evaluation: every item, no filter, no refill
    trajectories.py           the player of trajectories: members played turn by turn in environments
    trajectory.py             one trajectory, from the wait for a seat to its end
    seats.py                  how many play at once, and which environment each gets
    dialogue.py               how a trajectory's text becomes tokens and back
    trajectory_counts.py      what became of trajectories, and where their time went
    trajectory_validation.py  held-out evaluation by trajectories
    clock.py                  a virtual clock for tests: an event loop whose time jumps

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
from sluice.execution.shell import Journal, LocalShell, Recorder, TaskSource
from sluice.execution.validation import ValidationResult, validate

__all__ = [
    "Attempt",
    "AttemptFailed",
    "GroupClosed",
    "Journal",
    "Judged",
    "LocalShell",
    "LoopContext",
    "Recorder",
    "RolloutLoop",
    "RoundsUsedUp",
    "TaskSource",
    "TokensUsedUp",
    "ValidationResult",
    "load_loop",
    "validate",
]
