"""The room that decides when to launch, replace, accept, cancel and deliver. Pure: no clock, no torch, no asyncio.

    events.py    what the machine is told and what it answers; one record per group that left
    buffer.py    ReplayBuffer: begin, commit or abort, take; quota and expiry
    slots.py     which groups may still be launched, and of which domain
    prompts.py   prompts that come back once, or never again
    groups.py    a group on its way, and its story
    tally.py     counts of one batch, and words for whoever asks why it is short
    machine.py   Scheduler: handle(event, now) -> instructions
    state.py     what a machine saves, and how it goes on from that
    watch.py     what the machine waits for, and where everything stands

A new kind of event is a record in events.py, a line in `Scheduler._handlers`, and its method. Whatever a player (shell, simulator) must
do is an instruction, never a call from here.
"""

from sluice.scheduler.buffer import ReplayBuffer
from sluice.scheduler.events import GroupRecord
from sluice.scheduler.machine import Scheduler, SchedulerConfig

__all__ = ["GroupRecord", "ReplayBuffer", "Scheduler", "SchedulerConfig"]
