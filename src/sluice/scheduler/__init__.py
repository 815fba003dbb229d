"""The room that decides when to launch, replace, accept, cancel and deliver. Pure: no clock, no torch, no asyncio.

    events.py    what the machine is told and what it answers; one record per group that left
    buffer.py    ReplayBuffer: begin, commit or abort, take; quota and expiry
    slots.py     which groups may still be launched, and of which domain
    prompts.py   prompts that come back once, or never again
    groups.py    a group on its way, and its story
    tally.py     counts of one batch, and words for whoever asks why it is short
    settings.py  SchedulerConfig
    machine.py   Scheduler: handle(event, now) -> instructions; steps, weights, time, the end. It is made of these, each on top of the next:
    batches.py       which groups are launched, when a batch is full, what happens when it cannot be
    loop_groups.py   groups that a user-defined loop owns
    members.py       attempts: launch, settle, accept or reject, replace
    cutting.py       what the gate decides: a group is cut, a trajectory stopped, members wait
    judging.py       whole groups: filter, guard, commit or drop, and how every group leaves
    core.py          what the machine knows, and what can be asked of it
    slots.py     which groups may still be launched; the domain of each place in a mix
    prompts.py   what becomes of the prompts of groups that were not judged
    tally.py     counts of one batch, and the words of its messages
    gating.py    MachineGate: the gate's keepers, as the machine speaks to them
    watch.py     what the machine waits for, for a person
    state.py     what is saved, and how a later process goes on
    group_queue.py   GroupQueue: the same machine for environment managers of others: episodes out, members in, batches out

A new kind of event is a record in events.py, a line in `Scheduler._handlers`, and its method. Whatever a player (shell, simulator) must
do is an instruction, never a call from here.
"""

from sluice.scheduler.buffer import ReplayBuffer
from sluice.scheduler.events import GroupRecord
from sluice.scheduler.gating import MachineGate
from sluice.scheduler.group_queue import GroupQueue
from sluice.scheduler.machine import Scheduler
from sluice.scheduler.settings import SchedulerConfig

__all__ = ["GroupQueue", "GroupRecord", "MachineGate", "ReplayBuffer", "Scheduler", "SchedulerConfig"]
