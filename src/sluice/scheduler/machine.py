"""The machine: it decides which groups to launch, replace, accept, cancel and deliver. Event in, instructions out; it never waits.

How a batch is filled (`BatchWanted(n)`): slots are opened for n groups, and for ceil(r x n) more that later batches will need. A group
whose members have delivered is judged once; a dropped one is replaced at once by a new group of the next round, until n are committed. Then
the batch is delivered whole. Synchronous (r = 0): whatever still runs is cancelled. Asynchronous: it goes on while the trainer steps, and
expires when it has become too old. Every bound ends in `on_exhausted`: raise, shrink, or top up with dropped low-information groups.

Invariants: every attempt ends once, every launched group leaves once, what a batch holds is whole groups of distinct members, and running
plus committed groups never exceed the open quota plus `max_additional_running_prompts`. While a batch is wanted, something is under way, or
`waiting_for` names what is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sluice.errors import SchedulerBug
from sluice.filters import DomainFilters
from sluice.ledger import Ledger
from sluice.scheduler import events as ev
from sluice.types import Verdict

if TYPE_CHECKING:
    from sluice.filters import RatioGuard
    from sluice.scheduler.gating import MachineGate
from sluice.scheduler.batches import Batches
from sluice.scheduler.core import HELD_BY_GUARD, SHUTDOWN
from sluice.scheduler.settings import SchedulerConfig


class Scheduler(Batches):
    """Fills batches with whole, judged groups. `handle(event, now)` returns what to do next; time is passed in, in seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        filters: Mapping[str, DomainFilters],
        ledger: Ledger | None = None,
        guard: RatioGuard | None = None,
        gate: MachineGate | None = None,
    ) -> None:
        """guard: bounds the share of judged groups that filters may drop; None: no bound. gate: decides on running groups; None: nobody.

        Raises `ValueError` for a gate where user-defined loops own the groups: their members take no steps that anybody tells.
        """
        if gate is not None and config.has_user_loop:
            raise ValueError("a gate needs members that tell their steps, and those of a user-defined loop do not - leave one of them out")
        super().__init__(config, filters, ledger, guard, gate)
        self._handlers: dict[type, Callable[[Any, float, list[ev.Instruction]], None]] = {
            ev.BatchWanted: self._batch_wanted,
            ev.TaskDrawn: self._task_drawn,
            ev.TasksExhausted: self._tasks_exhausted,
            ev.MemberStepped: self._member_stepped,
            ev.MemberEnded: self._member_ended,
            ev.MemberFinished: self._member_finished,
            ev.MemberFailed: self._member_failed,
            ev.MemberCancelled: self._member_cancelled,
            ev.LateTokens: self._late_tokens,
            ev.WorkerLost: self._worker_lost,
            ev.StepAdvanced: self._step_advanced,
            ev.WeightsUpdated: self._weights_updated,
            ev.ClockTick: self._clock_tick,
            ev.LoopAttempt: self._loop_attempt,
            ev.GroupReturned: self._group_returned,
            ev.Shutdown: self._shutdown,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event, at `now` seconds, and answer with the instructions that follow from it, in order.

        Raises `SchedulerBug` for an event that cannot be, with the story of the group, and `FilterError` or `LoopError` when a filter or a
        user-defined loop breaks its contract.
        """
        out: list[ev.Instruction] = []
        try:
            handler = self._handlers[type(event)]
        except KeyError:
            raise SchedulerBug(f"expected one of the events in sluice.scheduler.events, got {type(event).__name__}: {event!r}") from None
        handler(event, now, out)
        return out

    # ------------------------------------------------------------ steps, weights, time and the end

    def _step_advanced(self, event: ev.StepAdvanced, now: float, out: list[ev.Instruction]) -> None:
        if event.step <= self.step:
            raise SchedulerBug(f"StepAdvanced({event.step}): steps only go forward, the run is at {self.step}")
        if self._wanted is not None:
            raise SchedulerBug(f"StepAdvanced({event.step}) while the batch of step {self.step} is still being filled")
        for group in self._delivered:
            self._leave(group, "trained", None, now, out)
        self._delivered = []
        self._closed = None
        self.step = event.step
        self.buffer.step_to(event.step)
        self.ledger.trained_usefully(event.useful_groups, event.useful_tokens)
        if self.config.is_async or self.buffer.committed:
            self._collect_garbage(now, out)
            self._go_on(now, out)

    def _weights_updated(self, event: ev.WeightsUpdated, now: float, out: list[ev.Instruction]) -> None:
        if self.version is not None and event.version < self.version:
            raise SchedulerBug(f"WeightsUpdated({event.version}): versions only go forward, the engine was at {self.version}")
        self.version = event.version
        if self.config.on_weight_update == "restart":
            for attempt_id in event.generating:
                self._restart(attempt_id, now, out)
        self._go_on(now, out)

    def _restart(self, attempt_id: int, now: float, out: list[ev.Instruction]) -> None:
        """A member begins anew under the new weights: no round is used up, its seed stays, what it had sampled is counted as cancelled."""
        group = self._running.get(attempt_id)
        if group is None or attempt_id in self._detached or group.has_loop:
            return
        index = group.slots.index(attempt_id)
        group.story.append((now, "restarted by new weights", index))
        self._let_go(group, index, out)
        group.tries[index] -= 1
        self._launch(group, index, now, out)
        if self.gate is not None:
            self.gate.lost(group, index, is_replaced=True)

    def _clock_tick(self, event: ev.ClockTick, now: float, out: list[ev.Instruction]) -> None:
        self._wake_at = math.inf
        while self._deadlines:
            group_id, due = next(iter(self._deadlines.items()))
            if due > now:
                break
            group = self._groups[group_id]
            evidence = {"group_timeout_s": float(self.config.group_timeout_s or 0.0), "missing": float(group.missing)}
            self._drop(group, Verdict.dropped("group_timeout", "invalid", "scheduler", evidence), now, out, is_lost=True, is_failure=True)
        stall = self.config.stall_warning_s
        if stall is not None and self._wanted is not None and not self._is_stall_told and now >= self._progress_at + stall:
            self._is_stall_told = True
            message = (
                f"step {self.step}: no group has come or gone for {now - self._progress_at:.0f} s. Waiting for {self.waiting_for(now)}"
            )
            out.append(ev.Warn(key="stall", message=f"{message} - see `sluice status`, or set resampling.group_timeout_s"))
        self._arm(out)

    def _shutdown(self, event: ev.Shutdown, now: float, out: list[ev.Instruction]) -> None:
        self._stopped = True
        self._wanted = None
        self.slots.forget()
        self._release_spares(now, out)
        for open_group, _, _ in self._held:
            self.buffer.abort(open_group.group_id, HELD_BY_GUARD)
            self._leave(open_group, "discarded", HELD_BY_GUARD, now, out)
        self._held.clear()
        self._delivered = []
        self.buffer.take_all()
        for group in list(self._groups.values()):
            if group.outcome is not None:
                continue  # on its way out already
            if group.closed:
                self._leave(group, "discarded", SHUTDOWN, now, out)
            else:
                self._abandon(group, "cancelled", SHUTDOWN, now, out)
        self._return_later(out)
