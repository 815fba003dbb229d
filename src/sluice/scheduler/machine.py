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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from sluice.errors import FilterError, LoopError, SchedulerBug
from sluice.filters import DomainFilters
from sluice.ledger import Ledger
from sluice.scheduler import events as ev
from sluice.scheduler import state, watch
from sluice.scheduler.buffer import ReplayBuffer
from sluice.scheduler.groups import OpenGroup, scramble
from sluice.scheduler.prompts import Prompts
from sluice.scheduler.slots import Mix, Slot, Slots
from sluice.scheduler.tally import Sums, Tally
from sluice.types import EMPTY, Batch, Failure, Group, Rollout, Task, TruncatedPolicy, Verdict

if TYPE_CHECKING:
    from sluice.filters import RatioGuard

EMPTY_BATCHES_IN_A_ROW: Final = 3  # batches of which nothing was kept, after which the run is an error whatever the policy
SMOOTHING: Final = 8.0  # judged groups that a perfect acceptance is worth before anything is measured: no over-launch on thin evidence
NOTHING_KEPT_BATCHES: Final = 3  # so many times the batch dropped in a row without a keep: worth a warning before the bound acts

# Reasons for which a group is given up. Nothing judged it, so that no category is recorded for it.
CANCELLED_BATCH_FULL: Final = Verdict.dropped("batch_full", "low_information", "scheduler")
SHUTDOWN: Final = Verdict.dropped("shutdown", "low_information", "scheduler")
STALE: Final = Verdict.dropped("stale", "invalid", "scheduler")
HELD_BY_GUARD: Final = Verdict.dropped("held_by_guard", "low_information", "ratio_guard")
OVERFLOW: Final = Verdict.dropped("domain_full", "low_information", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of the machine, as it uses them."""

    group_size: int
    seed: int = 0
    redundancy: int = 0  # members of a group beyond group_size that may run; the first group_size to deliver make the group
    fill: Literal["refill", "shrink"] = "refill"
    collect: Literal["as_finished", "in_order"] = "as_finished"
    max_resample_rounds: int = 10  # round 1 is the groups asked for
    max_groups_per_batch: int | None = None
    max_response_rounds: int = 5  # the first generation and the rounds of replacing members
    on_exhausted: Literal["raise", "shrink", "keep_low_information"] = "raise"
    min_members: int | None = None  # None: group_size
    truncated: TruncatedPolicy = "mask"
    on_member_failure: Literal["replace", "judge"] = "replace"
    max_additional_running_prompts: int = 0  # groups beyond the quota that may run at once; 0 without is_use_additional_prompts
    async_generation_ratio: float = 0.0
    on_weight_update: Literal["finish", "restart", "continue"] = "finish"
    surplus: Literal["carry", "discard"] | None = None  # None: discard when synchronous, else carry
    max_staleness: int | None = None  # None: ceil(async_generation_ratio)
    domain_staleness: Mapping[str, int] = field(default_factory=lambda: EMPTY)  # by domain, where it has its own
    domain_shares: Mapping[str, float] | None = None  # None: domains come as the source gives them
    mix_on: Literal["kept", "drawn"] = "kept"
    absent_after_batches: int = 10  # batches in a row without some domain, after which that is said
    group_timeout_s: float | None = None  # from launch to verdict
    requeue: bool = True
    quarantine_after: int | None = None
    stall_warning_s: float | None = None
    has_user_loop: bool = False  # groups are owned by a user-defined loop

    def __post_init__(self) -> None:
        for name in ("group_size", "max_resample_rounds", "max_response_rounds", "absent_after_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"SchedulerConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.redundancy < 0:
            raise ValueError(f"SchedulerConfig.redundancy must be at least 0, got {self.redundancy}")
        if self.min_members is not None and not 1 <= self.min_members <= self.group_size:
            raise ValueError(f"SchedulerConfig.min_members must lie between 1 and group_size ({self.group_size}), got {self.min_members}")
        for name in ("max_groups_per_batch", "quarantine_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"SchedulerConfig.{name} must be at least 1 or None, got {value}")
        for name in ("group_timeout_s", "stall_warning_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"SchedulerConfig.{name} must be above 0 or None, got {value}")
        ahead = math.ceil(self.async_generation_ratio)
        for domain, age in self.domain_staleness.items():
            if age < ahead:
                raise ValueError(f"SchedulerConfig.domain_staleness[{domain!r}] must be at least ceil(async ratio) ({ahead}), got {age}")
        if self.surplus == "carry" and self.staleness < 1:
            raise ValueError("SchedulerConfig.surplus 'carry' needs a max_staleness of at least 1, got 0 - carried groups would all expire")
        if self.surplus == "discard" and self.async_generation_ratio > 0:
            raise ValueError("SchedulerConfig.surplus 'discard' needs async_generation_ratio 0 - all that is prepared ahead would be lost")

    @property
    def staleness(self) -> int:
        """Oldest age at which a group is trained, in steps."""
        return math.ceil(self.async_generation_ratio) if self.max_staleness is None else self.max_staleness

    @property
    def is_async(self) -> bool:
        """Whether groups run while the trainer steps."""
        return self.async_generation_ratio > 0

    @property
    def goes_by_ticket(self) -> bool:
        """Whether a batch is made of the groups launched for it, and not of the first ones to finish."""
        return self.fill == "shrink" or self.collect == "in_order"


class Scheduler:
    """Fills batches with whole, judged groups. `handle(event, now)` returns what to do next; time is passed in, in seconds."""

    def __init__(
        self, config: SchedulerConfig, filters: Mapping[str, DomainFilters], ledger: Ledger | None = None, guard: RatioGuard | None = None
    ) -> None:
        """guard: bounds the share of judged groups that filters may drop; None: no bound."""
        self.config = config
        self.filters = filters
        self.guard = guard
        self.ledger = Ledger() if ledger is None else ledger
        self.buffer = ReplayBuffer(
            async_generation_ratio=config.async_generation_ratio,
            max_additional_running_prompts=config.max_additional_running_prompts,
            max_staleness=config.max_staleness,
        )
        self.step = 0
        self.version: int | None = None  # of the weights that the engine samples with; None: nobody has told
        self.prompts = Prompts(requeue=config.requeue, quarantine_after=config.quarantine_after)
        self.slots = Slots(None if config.domain_shares is None else Mix(config.domain_shares), mixes_draws=config.mix_on == "drawn")
        self._least_staleness = min([config.staleness, *config.domain_staleness.values()])
        self._running: dict[int, OpenGroup] = {}  # attempt_id -> its group
        self._detached: set[int] = set()  # of these, the ones that were let go and are not settled yet
        self._groups: dict[int, OpenGroup] = {}  # launched, not left
        self._next_attempt = 0
        self._next_group = 0
        self._requested = 0  # groups asked for
        self._batches_left: int | None = None  # that will be asked for after this one; None: unknown
        self._wanted: int | None = None  # of these, how many the batch shall have; None: no batch is asked for
        self._wanted_since = 0.0
        self._needs: Counter[str] = Counter()  # groups of each domain that the batch shall have, where kept groups are mixed
        self._budget: int | None = None  # groups that may still be launched for this batch; None: no such bound
        self._tally = Tally()
        self._delivered: list[OpenGroup] = []  # of the batch that is being trained
        self._spare: deque[tuple[OpenGroup, Group, Verdict]] = deque()  # dropped for low information, kept in reserve for the batch
        self._held: deque[tuple[OpenGroup, Group, Verdict]] = deque()  # the guard does not let them go yet
        self._ended: set[str | None] = set()  # domains (None: all) of which the source had nothing left when it was last asked
        self._excused: set[str | None] = set()  # of these, at some time of this batch: it does not insist on its share of them
        self._skipped_in_a_row = 0  # draws of prompts in quarantine
        self._stopped = False
        self._empty_in_a_row = 0
        self._absent = dict.fromkeys(filters, 0)  # domain -> batches in a row without it
        self._first_details: dict[tuple[str, str], str] = {}  # (domain, reason of failure) -> the first one, in words
        self._judged = 0  # groups judged since the start
        self._kept = 0
        self._deadlines: dict[int, float] = {}  # of groups that nothing has judged yet, in order
        self._wake_at = math.inf  # the WakeAt that stands
        self._progress_at = 0.0  # when a group last came or went
        self._is_stall_told = False
        self._handlers: dict[type, Callable[[Any, float, list[ev.Instruction]], None]] = {
            ev.BatchWanted: self._batch_wanted,
            ev.TaskDrawn: self._task_drawn,
            ev.TasksExhausted: self._tasks_exhausted,
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

    # ------------------------------------------------------------ what can be asked

    @property
    def running_attempts(self) -> int:
        """Attempts under way, cancelled ones that are not acknowledged yet included."""
        return len(self._running)

    @property
    def running_groups(self) -> int:
        """Groups in the buffer that have not been judged."""
        return self.buffer.running

    @property
    def open_groups(self) -> int:
        """Groups launched that have not left."""
        return len(self._groups)

    @property
    def filling(self) -> tuple[int, int] | None:
        """(kept, wanted) of the batch being filled; None: no batch is wanted."""
        return None if self._wanted is None else (self._kept_now(), self._wanted)

    @property
    def acceptance_rate(self) -> float | None:
        """Kept / judged groups since the start; None: nothing judged yet."""
        return self._kept / self._judged if self._judged else None

    def story(self, group_id: int) -> str:
        """The story of an open group."""
        group = self._groups.get(group_id)
        return f"group {group_id} is not open" if group is None else group.tell()

    def waiting_for(self, now: float) -> str:
        """What the batch waits for, in words; "" when no batch is wanted."""
        return watch.waiting_for(self, now)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Where everything stands, as plain data for JSON."""
        return watch.snapshot(self, now)

    def metrics(self) -> dict[str, float]:
        """Counts since the start: the ledger's, the guard's, and what became of prompts."""
        out = self.ledger.metrics()
        if self.guard is not None:
            out |= self.guard.metrics()
        out["scheduler/expired_groups"] = float(self.buffer.expired)
        out["scheduler/requeued_prompts"] = float(self.prompts.requeued)
        out["scheduler/quarantined_prompts"] = float(len(self.prompts.quarantined))
        out["scheduler/late_results"] = float(self.ledger.late_results + self.buffer.late_transactions)
        return out

    def state_dict(self, in_flight: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Everything that a later process needs to go on; this machine is not changed. Plain data and numpy arrays.

        Committed groups are in it whole. Running groups are not: they are accounted for as cancelled, and their prompts are listed under
        "outstanding", to be drawn first. in_flight: attempt_id -> tokens sampled so far, for every running attempt (missing ones: 0).
        """
        return state.save(self, {} if in_flight is None else in_flight)

    def load_state_dict(self, saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> list[ev.Instruction]:
        """In a fresh machine: go on where `saved` was taken. tasks: by task_id. Returns what has to be written down about it.

        Raises `RecordError` for a state that is torn or does not fit.
        """
        return state.load(self, saved, tasks)

    # ------------------------------------------------------------ the batch

    def _batch_wanted(self, event: ev.BatchWanted, now: float, out: list[ev.Instruction]) -> None:
        if event.groups < 1:
            raise SchedulerBug(f"BatchWanted.groups must be at least 1, got {event.groups}")
        if self._wanted is not None:
            raise SchedulerBug(f"BatchWanted while a batch of {self._wanted} groups is still being filled - wait for DeliverBatch")
        if self._delivered:
            raise SchedulerBug("BatchWanted before StepAdvanced: the groups of the last batch have not been accounted for")
        if self._stopped:
            raise SchedulerBug("BatchWanted after Shutdown")
        self._requested = self._wanted = event.groups
        self._batches_left = event.batches_left
        self._excused = set(self._ended)
        self._wanted_since = self._progress_at = now
        self._is_stall_told = False
        self._close_quota()  # of a batch that could not be filled, or was being filled when a checkpoint was taken
        self.buffer.advance_step(self.step, event.groups)
        self._collect_garbage(now, out)
        self._open_slots()
        self._go_on(now, out)
        self._arm(out)

    def _close_quota(self) -> None:
        """No batch is open: only what may be prepared ahead is needed."""
        self.buffer.close_batch(max(0, self.buffer.quota - (self.buffer.lookahead if self.config.is_async else 0)))

    def _open_slots(self) -> None:
        """Owe a group of round 1 for every place of this batch, and of the lookahead, that has none."""
        slots, wanted = self.slots, self._requested
        total = wanted + self.buffer.lookahead
        if self._batches_left is not None:
            total = min(total, wanted * (1 + self._batches_left))
        end = slots.base + total
        if self.config.goes_by_ticket:
            taken = {group.slot.ticket for group in self._groups.values() if group.outcome is None}
            taken.update(slot.ticket for slot in slots.waiting())
            first = max(slots.base, slots.next_ticket) if self.config.fill == "shrink" else slots.base
            slots.owed.extend([slots.give(ticket) for ticket in range(first, end) if ticket not in taken])
        elif slots.mix is not None and self.config.mix_on == "kept":
            self._needs = slots.mix.counts(slots.base, slots.base + wanted)
            have = self._by_domain()
            have.update(str(slot.domain) for slot in slots.waiting())
            for ticket in range(slots.base, end):
                domain = slots.mix.domain_of(ticket)
                if have[domain] > 0:
                    have[domain] -= 1
                else:
                    slots.owed.append(slots.give(ticket))
        else:
            missing = total - self.buffer.running - self.buffer.committed - slots.drawing - len(slots.owed)
            for _ in range(missing):
                slots.owed.append(slots.give(slots.next_ticket))
        limit = self.config.max_groups_per_batch
        if limit is not None:
            self._budget = limit + max(0, len(slots.owed) - wanted)  # what is prepared for later batches does not count

    def _by_domain(self) -> Counter[str]:
        """Running and committed groups of each domain."""
        return Counter(group.task.domain for group in self._groups.values() if group.outcome is None)

    def _go_on(self, now: float, out: list[ev.Instruction]) -> None:
        """Launch what may be launched, deliver what is full, act on the bound: called after everything that changes the buffer."""
        self._progress_at = now
        if self._wanted is not None and self._is_full():
            self._deliver(now, out)
            return
        if self._wanted is None and not self._prepares:
            return
        self._draw(out)
        if self._wanted is None or not self._is_stuck():
            return
        if self._held:
            self._release_held(now, out)
        elif self._waits_for_weights():
            return
        elif self._make_room(now, out):
            self._go_on(now, out)
        else:
            self._exhausted(now, out)

    def _is_full(self) -> bool:
        assert self._wanted is not None
        if self.config.fill == "shrink":
            return False  # every group launched for the batch is waited for
        if self.buffer.committed < self._wanted:
            return False
        if self.config.collect == "in_order":
            return self._kept_now() >= self._wanted
        if self._needs:
            ready = Counter(group.task.domain for group in self.buffer.groups())
            return all(ready[domain] >= needed or domain in self._excused for domain, needed in self._needs.items())
        return True

    def _window_end(self) -> int:
        """First ticket behind the batch being filled."""
        return self.slots.base + self._requested

    def _kept_now(self) -> int:
        """Committed groups that the batch being filled may take."""
        if not self.config.goes_by_ticket:
            return self.buffer.committed
        end = self._window_end()
        return sum([self._groups[group.group_id].slot.ticket < end for group in self.buffer.groups()])

    def _is_stuck(self) -> bool:
        """Whether nothing is under way that could bring the batch a group; groups that the guard holds apart."""
        if not self.config.goes_by_ticket:
            return self.buffer.running == len(self._held) and not self.slots.drawing
        end = self._window_end()
        if any(slot is not None and slot.ticket < end for slot in self.slots.draws):
            return False
        held = {group.group_id for group, _, _ in self._held}
        return not any(
            group.slot.ticket < end and group.outcome is None and not group.closed and group.group_id not in held
            for group in self._groups.values()
        )

    def _waits_for_weights(self) -> bool:
        """Whether a group launched now would be too old for the step that it is launched in."""
        return self.version is not None and self.version < self.step - self._least_staleness

    def _is_dry(self) -> bool:
        """Whether the source had nothing left when it was last asked."""
        mix = self.slots.mix
        return bool(self._ended) and (None in self._ended or (mix is not None and self._ended.issuperset(mix.domains)))

    def _draw(self, out: list[ev.Instruction]) -> None:
        slots = self.slots
        additional = 0 if self.config.goes_by_ticket else self.config.max_additional_running_prompts
        if not slots.owed and not additional:
            return
        if self._is_dry() or self._waits_for_weights():
            return
        drawing = slots.drawing
        room = self.buffer.poll() - drawing
        if additional:
            under_way = self.buffer.running + drawing
            demand = max(self.buffer.quota - self.buffer.committed, self._lacking())
            target = math.ceil(demand * (self._judged + SMOOTHING) / (self._kept + SMOOTHING))
            room = min(room, target - under_way)
        while room > 0 and self._budget != 0:
            if slots.owed:
                slot = slots.owed.popleft()
            elif additional and self._wanted is not None and self._tally.ahead < additional:
                self._tally.ahead += 1  # launched ahead of a drop that the acceptance rate foretells
                slot = self._extra_slot()
            else:
                break
            slot = slots.to_draw(slot)
            if slot.domain in self._ended:
                slot = self._turned_over(slot)
            if self._budget is not None:
                self._budget -= 1
            slots.draws.append(slot)
            out.append(_DRAW if slot.domain is None else ev.DrawTask(domain=slot.domain))
            room -= 1

    def _lacking(self) -> int:
        """Groups that domains still lack in the batch, whatever other domains have ready."""
        if not self._needs:
            return 0
        lacking = self._needs - Counter(group.task.domain for group in self.buffer.groups())
        return sum([count for domain, count in lacking.items() if domain not in self._ended])

    def _extra_slot(self) -> Slot:
        slots = self.slots
        if slots.mix is None or not self._needs:
            return slots.give(slots.next_ticket)
        have = self._by_domain()
        have.update(str(slot.domain) for slot in slots.waiting())
        domain = max(sorted(self._needs), key=lambda name: self._needs[name] - have[name])  # the one that is furthest behind
        return slots.give(slots.next_ticket)._replace(domain=domain)

    def _turned_over(self, slot: Slot) -> Slot:
        """The slot of a domain that has ended goes to one that has not."""
        mix = self.slots.mix
        assert mix is not None
        return slot._replace(domain=mix.largest(set(mix.domains) - self._ended))

    def _task_drawn(self, event: ev.TaskDrawn, now: float, out: list[ev.Instruction]) -> None:
        task, slots = event.task, self.slots
        if not slots.draws:
            raise SchedulerBug(f"TaskDrawn ({task.task_id!r}) without a DrawTask")
        slot = slots.draws.popleft()
        if slot is None:
            self._return(task, event.epoch, out)  # its batch was filled meanwhile
            return
        if task.domain not in self.filters:
            raise SchedulerBug(f"task {task.task_id!r} has domain {task.domain!r}, known are {sorted(self.filters)}")
        if slot.domain is not None and task.domain != slot.domain:
            raise SchedulerBug(f"a task of domain {slot.domain!r} was to be drawn, got {task.task_id!r} of domain {task.domain!r}")
        self._tally.drawn += 1
        if task.task_id in self.prompts.quarantined:
            self._skip(slot, now, out)
            return
        self._skipped_in_a_row = 0
        self._tally.launched += 1
        group_id = self._next_group
        self._next_group += 1
        self.buffer.begin(group_id, self.config.domain_staleness.get(task.domain))
        self.ledger.groups_launched += 1
        group = OpenGroup(
            group_id=group_id,
            task=task,
            epoch=event.epoch,
            slot=slot,
            start_step=self.step,
            size=self.config.group_size,
            redundancy=self.config.redundancy,
            seed=self.config.seed,
            now=now,
        )
        self._groups[group_id] = group
        if self.config.group_timeout_s is not None:
            group.deadline = now + self.config.group_timeout_s
            self._deadlines[group_id] = group.deadline
            self._arm(out)
        if self.config.has_user_loop:
            group.has_loop = True
            out.append(ev.RunLoop(group_id=group_id, task=task, epoch=event.epoch, start_step=self.step))
            return
        for member_index in range(len(group.slots)):
            self._launch(group, member_index, now, out)

    def _skip(self, slot: Slot, now: float, out: list[ev.Instruction]) -> None:
        """A prompt in quarantine was drawn: it is consumed, and another one is drawn in its stead."""
        self.prompts.skipped += 1
        self._skipped_in_a_row += 1
        # One permutation of the data may end with all of them and the next one begin with all of them.
        if self._skipped_in_a_row > 2 * len(self.prompts.quarantined):
            reasons = Counter(self.prompts.quarantined.values())
            told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
            self._fail(
                f"step {self.step}: expected prompts to sample, but all that are left ({len(self.prompts.quarantined)}) are in quarantine "
                f"because their groups were lost again and again ({told}). {self._tally.why(self._first_details)} - see why, or raise "
                "resampling.quarantine_after",
                now,
                out,
            )
            return
        self.slots.draws.append(slot)
        out.append(_DRAW if slot.domain is None else ev.DrawTask(domain=slot.domain))

    def _tasks_exhausted(self, event: ev.TasksExhausted, now: float, out: list[ev.Instruction]) -> None:
        slots = self.slots
        if not slots.draws:
            raise SchedulerBug("TasksExhausted without a DrawTask")
        slot = slots.draws.popleft()
        if slot is None:
            return  # whoever asks next is told again
        if self._budget is not None:
            self._budget += 1
        slots.owed.appendleft(slot)
        if self.prompts.later:
            self._return_later(out)
        elif slot.domain not in self._ended:
            self._ended.add(slot.domain)
            self._excused.add(slot.domain)
            if slot.domain is not None and not self._is_dry():
                message = f"domain {slot.domain!r} has no prompts left: its share of the batches goes to the other domains"
                out.append(ev.Warn(key=f"ended/{slot.domain}", message=message))
        self._go_on(now, out)

    def _return(self, task: Task, epoch: int, out: list[ev.Instruction]) -> None:
        out.append(ev.ReturnTask(task=task, epoch=epoch))
        self._ended.discard(None)
        self._ended.discard(task.domain)

    def _return_later(self, out: list[ev.Instruction]) -> None:
        for task, epoch in self.prompts.later:
            self._return(task, epoch, out)
        self.prompts.later.clear()

    def _make_room(self, now: float, out: list[ev.Instruction]) -> bool:
        """Ready groups of full domains fill the buffer, and the batch lacks groups of another one: let the oldest of them go."""
        slots = self.slots
        if not self._needs or not slots.owed or self._is_dry() or self._budget == 0 or self.buffer.poll() > 0:
            return False
        ready = self.buffer.groups()
        excess = Counter(group.task.domain for group in ready) - self._needs
        crowd = {group.group_id for group in ready if excess[group.task.domain] > 0}
        if not crowd:
            return False
        for group in self.buffer.evict(len(crowd) - 1, among=crowd):
            self._give_up(self._groups[group.group_id], "surplus", OVERFLOW, now, out)
        return True

    def _select(self, wanted: int) -> list[int]:
        """Ids of the committed groups that make the batch, oldest first."""
        ready = self.buffer.groups()
        if self.config.goes_by_ticket:
            end = self._window_end()
            ready = [group for group in ready if self._groups[group.group_id].slot.ticket < end]
            ready.sort(key=lambda group: self._groups[group.group_id].slot.ticket)
        if not self._needs:
            return [group.group_id for group in ready]
        left = Counter(self._needs)
        first: list[int] = []
        rest: list[int] = []
        for group in ready:
            (first if left[group.task.domain] > 0 else rest).append(group.group_id)
            left[group.task.domain] -= 1
        return [*first, *rest][:wanted]

    def _deliver(self, now: float, out: list[ev.Instruction], top_up: bool = False) -> None:
        tally, wanted = self._tally, self._wanted
        assert wanted is not None
        taken = self.buffer.take(self._select(wanted), wanted)
        groups = [self._groups[group.group_id] for group in taken]
        while top_up and self._spare and len(taken) < wanted:
            open_group, group, verdict = self._spare.popleft()
            tally.use_after_all(group, verdict)
            open_group.reason, open_group.source = verdict.reason, "on_exhausted"
            taken.append(group)
            groups.append(open_group)
        taken.sort(key=lambda group: (group.start_step, group.group_id))
        self._release_spares(now, out)
        self._wanted = None
        self._empty_in_a_row = 0
        self._delivered = groups
        self.slots.next_batch(self._requested)
        self._needs = Counter()
        self._close_quota()
        if self.config.is_async:
            self._trim_owed()
        else:
            self._end_synchronous_fill(now, out)
        self._return_later(out)
        is_last = self._is_dry() and not self.buffer.running and not self.buffer.committed and not self.slots.drawing
        batch = Batch(groups=tuple(taken), requested=self._requested, step=self.step, is_last=is_last)
        self._note_domains(batch, out)
        self._tally = Tally()
        out.append(ev.DeliverBatch(batch=batch, metrics=tally.metrics(batch, self.step)))
        if self._prepares:
            self._draw(out)

    @property
    def _prepares(self) -> bool:
        """Whether groups are launched while no batch is wanted."""
        return self.config.is_async and self._batches_left != 0

    def _trim_owed(self) -> None:
        """Slots that the lookahead has no room for are given up; the next batch opens what it needs."""
        slots = self.slots
        if self.config.goes_by_ticket:
            slots.owed = deque([slot for slot in slots.owed if slot.ticket >= slots.base])
        else:
            open_slots = self.buffer.running + self.buffer.committed + slots.drawing
            while slots.owed and open_slots + len(slots.owed) > self.buffer.lookahead:
                slots.owed.pop()

    def _end_synchronous_fill(self, now: float, out: list[ev.Instruction]) -> None:
        """The batch is full: nothing runs on into the next step."""
        self.slots.forget()
        for open_group, _, _ in self._held:
            self.buffer.abort(open_group.group_id, HELD_BY_GUARD)
            self._leave(open_group, "discarded", HELD_BY_GUARD, now, out)
        self._held.clear()
        if self.config.surplus != "carry":
            for surplus in self.buffer.take_all():
                self._leave(self._groups[surplus.group_id], "surplus", None, now, out)
        for open_group in list(self._groups.values()):
            if open_group.outcome is None and not open_group.closed:
                self._abandon(open_group, "cancelled", CANCELLED_BATCH_FULL, now, out)

    def _note_domains(self, batch: Batch, out: list[ev.Instruction]) -> None:
        """Say when a domain has been absent for long."""
        if len(self._absent) < 2 or not batch.groups:
            return
        present = {group.task.domain for group in batch.groups}
        every = self.config.absent_after_batches
        for domain in self._absent:
            count = self._absent[domain] = 0 if domain in present else self._absent[domain] + 1
            if count and count % every == 0:
                message = f"domain {domain!r}: 0 of the groups of the last {count} batches"
                advice = "see what drops them, raise rewards.<domain>.max_staleness if they expire, or set domain_interleave_probs"
                out.append(ev.Warn(key=f"absent/{domain}", message=f"{message} - {advice}"))

    def _exhausted(self, now: float, out: list[ev.Instruction]) -> None:
        """Nothing is under way for the batch and nothing may be launched, and it is short."""
        tally, kept = self._tally, self._kept_now()
        if self._is_dry() and self.prompts.later:
            self._return_later(out)
            self._go_on(now, out)
            return
        if self._is_dry():
            assert self._wanted is not None
            later = self.buffer.running + self.buffer.committed - kept  # groups of tickets behind the batch
            if not later and self.slots.drawing:
                return  # of later batches: each is told that nothing is left, or brings a group after all
            if later and (not kept or self.config.fill == "refill"):  # nothing comes for the empty places any more: it is their turn
                self.slots.next_batch(self._wanted - kept if self.config.fill == "refill" else self._requested)
                self._go_on(now, out)
            else:
                self._deliver(now, out)
            return
        policy = "shrink" if self.config.fill == "shrink" or tally.shrunk else self.config.on_exhausted
        if policy == "keep_low_information" and kept + len(self._spare):
            self._deliver(now, out, top_up=True)
            return
        if policy != "raise" and kept:
            self._deliver(now, out)
            return
        if policy != "raise":
            self._empty_in_a_row += 1
            if self._empty_in_a_row < EMPTY_BATCHES_IN_A_ROW:
                message = f"no group of {tally.judged} judged was kept: no optimiser step ({self._empty_in_a_row} such batch in a row)"
                out.append(ev.Warn(key="empty_batch", message=f"{message}. {tally.why(self._first_details)}"))
                self._try_again(now, out)
                return
        self._fail(self._exhaustion_message(kept, policy), now, out)

    def _try_again(self, now: float, out: list[ev.Instruction]) -> None:
        """Nothing was kept: begin anew, what was counted stays counted."""
        tally = self._tally
        tally.launched_before = tally.launched
        tally.ahead = 0
        tally.empty_tries += 1
        assert self._wanted is not None
        self.buffer.close_batch(self._wanted - self._requested)  # opens again what the guard has left out
        self._wanted = self._requested
        if self.config.fill == "shrink":
            self.slots.next_batch(self._requested)
        self.slots.owed.clear()
        self._open_slots()
        self._go_on(now, out)

    def _fail(self, message: str, now: float, out: list[ev.Instruction]) -> None:
        """The batch cannot be filled; what is kept stays for whoever asks again."""
        self.slots.forget()
        self._release_spares(now, out)
        if self._wanted is not None:
            self._wanted = None
            self._tally = Tally()
        out.append(ev.Fail(message=message))

    def _exhaustion_message(self, kept: int, policy: str) -> str:
        tally, limit = self._tally, self.config.max_groups_per_batch
        if policy != "raise":
            bound = f"{EMPTY_BATCHES_IN_A_ROW} batches in a row kept nothing"
        elif self._budget == 0:
            bound = f"resampling.max_groups_per_batch ({limit}) is reached"
        else:
            bound = f"resampling.max_resample_rounds ({self.config.max_resample_rounds}) is reached"
        rate = tally.kept / tally.judged if tally.judged else 0.0
        return (
            f"step {self.step}: expected a batch of {self._requested} groups, kept {kept} of {tally.judged} judged "
            f"(acceptance rate {rate:.1%}), and {bound}. {tally.why(self._first_details)} - {tally.advice(policy, self._first_details)}"
        )

    def _note(self, group: OpenGroup, failure: Failure, out: list[ev.Instruction]) -> None:
        """Tell the user the first failure of each kind in words; the others are counted."""
        key = (group.task.domain, failure.reason)
        if key not in self._first_details:
            self._first_details[key] = failure.detail
            message = f"domain {group.task.domain!r}: {failure.reason} for a response to task {group.task.task_id!r}: {failure.detail}"
            out.append(ev.Warn(key="/".join(key), message=f"{message} (told once, counted from here on)"))

    # ------------------------------------------------------------ members

    def _launch(self, group: OpenGroup, member_index: int, now: float, out: list[ev.Instruction]) -> None:
        attempt_id = self._next_attempt
        self._next_attempt = attempt_id + 1
        self._running[attempt_id] = group
        group.slots[member_index] = attempt_id
        group.running += 1
        group.attempts += 1
        group.tries[member_index] += 1
        # The same seed for a member that never delivered, a new one after a rejected response; rounds are bounded far below 65,536.
        seed = scramble(group.seed + (member_index << 16) + group.rejections[member_index])
        self.ledger.attempts_launched += 1
        out.append(ev.LaunchMember(attempt_id, group.group_id, member_index, group.task, seed))

    def _settle(self, attempt_id: int) -> tuple[OpenGroup, int] | None:
        """Group and member of a running attempt, which ends (member -1: it had been let go); None: it had ended before.

        Raises for an id never given out.
        """
        group = self._running.pop(attempt_id, None)
        if group is None:
            if not 0 <= attempt_id < self._next_attempt:
                raise SchedulerBug(f"attempt {attempt_id} was never launched (the last one is {self._next_attempt - 1})")
            return None
        group.running -= 1
        if attempt_id in self._detached:
            self._detached.discard(attempt_id)
            group.detached -= 1
            return group, -1
        index = group.slots.index(attempt_id)
        group.slots[index] = -1
        return group, index

    def _let_go(self, group: OpenGroup, member_index: int, out: list[ev.Instruction]) -> None:
        """Cancel one attempt; whatever still comes of it is only counted."""
        attempt_id = group.slots[member_index]
        group.slots[member_index] = -1
        group.detached += 1
        self._detached.add(attempt_id)
        out.append(ev.CancelMember(attempt_id=attempt_id))

    def _close(self, group: OpenGroup, out: list[ev.Instruction]) -> None:
        """No member is waited for any more: cancel those under way, and its loop."""
        group.closed = True
        self._deadlines.pop(group.group_id, None)
        if group.running > group.detached:
            for index, attempt_id in enumerate(group.slots):
                if attempt_id >= 0:
                    self._let_go(group, index, out)
        if group.has_loop:
            group.has_loop = False
            out.append(ev.CancelLoop(group_id=group.group_id))

    def _member_finished(self, event: ev.MemberFinished, now: float, out: list[ev.Instruction]) -> None:
        rollout = event.rollout
        attempt_id = rollout.attempt_id
        group = self._running.get(attempt_id)
        if group is None:
            self._settle(attempt_id)
            self.ledger.late_results += 1
            return
        index = rollout.member_index
        tokens = rollout.sampled_tokens
        if attempt_id in self._detached:
            self._settle(attempt_id)
            self._count_cancelled(group, tokens, now, out)
            return
        if (
            rollout.group_id != group.group_id
            or rollout.task_id != group.task.task_id
            or not 0 <= index < len(group.slots)
            or group.slots[index] != attempt_id
        ):
            raise SchedulerBug(
                f"attempt {attempt_id} belongs to group {group.group_id}, member {group.slots.index(attempt_id)}, "
                f"task {group.task.task_id!r}, but its rollout says group {rollout.group_id}, member {rollout.member_index}, "
                f"task {rollout.task_id!r}: members of a group share one task\n" + group.tell()
            )
        if rollout.reward is not None and not math.isfinite(rollout.reward):
            rollout = _without_reward(rollout)
        if rollout.failure is not None:
            self._note(group, rollout.failure, out)
        verdict = self._judge_member(group, rollout)
        del self._running[attempt_id]
        group.slots[index] = -1
        group.running -= 1
        group.tokens += tokens
        if verdict is None:
            group.delivered[index] = rollout
            group.counted[index] = rollout.finish_reason != "length" or self.config.truncated != "mask"
            group.missing -= 1
            group.open_tokens += tokens
            group.story.append((now, "delivered", index))
            self.ledger.member_opened(tokens)
            if group.has_loop:
                out.append(ev.MemberJudged(attempt_id=attempt_id, verdict=_MEMBER_KEPT))
            if group.disqualified is not None and self._drops_early(group, now, out):
                return
            if not group.missing and not group.has_loop:
                self._judge(group, now, out)
            return
        self.ledger.attempt_ended("rejected", tokens, verdict.reason)
        group.rejections[index] += 1
        group.had_fault = group.had_fault or (rollout.failure is not None and rollout.failure.cause == "infrastructure")
        group.story.append((now, f"rejected ({verdict.reason})", index))
        if group.has_loop:
            out.append(ev.MemberJudged(attempt_id=attempt_id, verdict=verdict))
        self._tally.member_rejected(verdict.reason)
        self._replace(group, index, now, out)

    def _judge_member(self, group: OpenGroup, rollout: Rollout) -> Verdict | None:
        """A drop, or None when the member stays."""
        if rollout.reward is None:
            if self.config.on_member_failure == "judge":
                return None
            reason = rollout.failure.reason if rollout.failure is not None else "reward_missing"
            return Verdict.dropped(reason, "invalid", "scheduler")
        if rollout.finish_reason == "length" and self.config.truncated in ("invalid", "drop_group"):
            verdict = Verdict.dropped("truncated", "invalid", "scheduler")
            if self.config.truncated == "invalid":
                return verdict
            if group.disqualified is None:
                group.disqualified = verdict
        response_filter = self.filters[group.task.domain].response
        if response_filter is None:
            return None
        try:
            verdict = response_filter.judge(rollout)
        except Exception as error:
            raise FilterError(f"the response filter of domain {group.task.domain!r} failed: {error}\n{group.tell()}") from error
        return None if verdict.keep else verdict

    def _drops_early(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> bool:
        """A member has made the group worthless: stop it now, unless a filter that nobody can foresee follows or the guard keeps it."""
        verdict = group.disqualified
        assert verdict is not None
        assert verdict.category is not None
        if not group.missing or self.filters[group.task.domain].query.is_opaque:
            return False
        if self.guard is not None:
            if group.guard_ticket is not None:
                return False  # it was asked when the first such member came
            group.guard_ticket = self.guard.count()
            if not self.guard.may_drop(verdict.category):
                return False
            self.guard.filter_counted(group.guard_ticket, verdict.category)
        self._judged += 1
        self._tally.group_judged(group.task.domain)
        self._drop(group, verdict, now, out)
        return True

    def _member_failed(self, event: ev.MemberFailed, now: float, out: list[ev.Instruction]) -> None:
        member = self._fail_member(event.attempt_id, event.failure, event.sampled_tokens, now, out, is_final=event.is_final)
        if member is not None:
            self._replace(*member, now, out)

    def _fail_member(
        self, attempt_id: int, failure: Failure, tokens: int, now: float, out: list[ev.Instruction], *, is_final: bool = False
    ) -> tuple[OpenGroup, int] | None:
        """Account for an attempt that never delivered. Group and member that lack it now; None: nobody waits for it."""
        settled = self._settle(attempt_id)
        if settled is None:
            self.ledger.late_results += 1
            return None
        group, index = settled
        if index < 0:
            self._count_cancelled(group, tokens, now, out)
            return None
        group.tokens += tokens
        if failure.detail or failure.cause == "infrastructure":
            self._note(group, failure, out)
        self.ledger.attempt_ended("failed", tokens, failure.reason)
        self._tally.member_rejected(failure.reason)
        if is_final:
            group.tries[index] = self.config.max_response_rounds
        elif failure.cause == "infrastructure":
            group.had_fault = True
        else:
            group.rejections[index] += 1  # of what the policy wrote: another try shall sample something else
        group.story.append((now, f"failed ({failure.reason})", index))
        return group, index

    def _member_cancelled(self, event: ev.MemberCancelled, now: float, out: list[ev.Instruction]) -> None:
        group = self._running.get(event.attempt_id)
        if group is not None and event.attempt_id not in self._detached:
            if not group.has_loop:
                raise SchedulerBug(f"attempt {event.attempt_id} was cancelled without a CancelMember\n{group.tell()}")
            index = group.slots.index(event.attempt_id)
            group.rejections[index] += 1  # another try shall sample something else
            group.story.append((now, "stopped by its loop", index))
        if self._settle(event.attempt_id) is None or group is None:
            return  # it finished while the cancel was on its way, and was settled then
        self._count_cancelled(group, event.sampled_tokens, now, out)

    def _count_cancelled(self, group: OpenGroup, tokens: int, now: float, out: list[ev.Instruction]) -> None:
        group.tokens += tokens
        self.ledger.attempt_ended("cancelled", tokens)
        self._record_if_settled(group, now, out)

    def _late_tokens(self, event: ev.LateTokens, now: float, out: list[ev.Instruction]) -> None:
        if not 0 <= event.attempt_id < self._next_attempt or event.attempt_id in self._running:
            raise SchedulerBug(f"LateTokens for attempt {event.attempt_id}, which has not ended")
        self.ledger.tokens_came_late(event.sampled_tokens)

    def _worker_lost(self, event: ev.WorkerLost, now: float, out: list[ev.Instruction]) -> None:
        failure = Failure(cause="infrastructure", reason="worker_lost", detail=event.detail)
        lost = [self._fail_member(attempt_id, failure, tokens, now, out) for attempt_id, tokens in event.attempts.items()]
        for member in lost:  # all are settled first: a group that one of them drops has nothing to cancel of the others
            if member is not None and not member[0].closed:
                self._replace(*member, now, out)

    def _replace(self, group: OpenGroup, member_index: int, now: float, out: list[ev.Instruction]) -> None:
        """A member did not deliver: others under way may be enough; else try again within the rounds; else it is lost."""
        if self.config.has_user_loop or group.running - group.detached >= group.missing:
            return
        rounds = self.config.max_response_rounds
        if group.tries[member_index] < rounds and group.slots[member_index] < 0:
            self._launch(group, member_index, now, out)
            return
        if self.config.redundancy:
            for place, tries in enumerate(group.tries):
                if tries < rounds and group.slots[place] < 0 and group.delivered[place] is None:
                    self._launch(group, place, now, out)
                    return
        group.lost += 1
        group.missing -= 1
        size = self.config.group_size
        if size - group.lost < self._needed_members:
            evidence = {"rounds": float(rounds), "lost": float(group.lost)}
            verdict = Verdict.dropped("response_retries", "invalid", "scheduler", evidence)
            self._drop(group, verdict, now, out, is_lost=group.had_fault, is_failure=True)
        elif not group.missing:
            self._judge(group, now, out)

    @property
    def _needed_members(self) -> int:
        return self.config.group_size if self.config.min_members is None else self.config.min_members

    # ------------------------------------------------------------ groups

    def _judge(self, open_group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        """Every member has delivered or is lost for good: commit or drop."""
        rollouts, counted = [], []
        for rollout, is_counted in zip(open_group.delivered, open_group.counted, strict=True):
            if rollout is not None:
                rollouts.append(rollout)
                counted.append(is_counted)
        group = _group(open_group, tuple(rollouts), tuple(counted))
        try:
            verdict = self.filters[open_group.task.domain].query.judge(group)
        except Exception as error:
            raise FilterError(f"the query filter of domain {open_group.task.domain!r} failed: {error}\n{open_group.tell()}") from error
        self._decide(open_group, group, verdict, now, out)

    def _decide(self, open_group: OpenGroup, group: Group, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A whole group has its verdict; the guard may have another word."""
        self._close(open_group, out)
        self.prompts.judged(open_group.task.task_id)
        self._judged += 1
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        if len(rewards) < len(group.rollouts):  # where survivors make the group, members without a reward have no part in its statistics
            members = zip(group.counted, group.rollouts, strict=True)
            group = replace(group, counted=tuple([is_counted and rollout.reward is not None for is_counted, rollout in members]))
        sums = Sums(sum(rewards), len(rewards), open_group.open_tokens, len(group.rollouts))
        self._tally.group_judged(group.task.domain, sums)
        guard = self.guard
        if guard is not None:
            was_asked = open_group.guard_ticket is not None
            if open_group.guard_ticket is None:
                open_group.guard_ticket = guard.count()
            if open_group.disqualified is not None and verdict.keep:  # where it was asked, it has kept the group then
                verdict = self._kept_by_guard(open_group.disqualified) if was_asked else open_group.disqualified
            if not verdict.keep:
                answer = self._guarded(open_group, group, verdict, now, out)
                if answer is None:
                    return
                verdict = answer
        elif open_group.disqualified is not None:
            verdict = open_group.disqualified
        if verdict.keep:
            self._commit(open_group, group, sums, verdict, now, out)
        elif self._keeps_spares and verdict.category == "low_information" and self._is_young(group):
            self._put_aside(open_group, group, verdict, now, out)
        else:
            self._drop(open_group, verdict, now, out)

    def _guarded(self, open_group: OpenGroup, group: Group, verdict: Verdict, now: float, out: list[ev.Instruction]) -> Verdict | None:
        """What the guard makes of a drop: the drop, a keep, or None when it has been acted on already."""
        guard, ticket = self.guard, open_group.guard_ticket
        assert guard is not None
        assert ticket is not None
        assert verdict.category is not None
        is_trainable = any(
            is_counted and rollout.reward is not None for is_counted, rollout in zip(group.counted, group.rollouts, strict=True)
        )
        if not is_trainable or guard.may_drop(verdict.category):
            guard.filter_counted(ticket, verdict.category)
            return verdict
        if guard.policy == "wait":
            open_group.story.append((now, f"held by the guard ({verdict.reason})", self.step))
            self._held.append((open_group, group, verdict))
            self._go_on(now, out)
            return None
        if guard.policy == "shrink":
            self._tally.shrunk += 1
            self._drop(open_group, verdict, now, out, is_replaced=False)
            return None
        if guard.policy == "raise":
            self._drop(open_group, verdict, now, out, is_replaced=False, goes_on=False)
            numbers = ", ".join(f"{name} {value:g}" for name, value in guard.metrics().items())
            self._fail(
                f"step {self.step}: expected filters to drop no more groups than guard.max_filter_ratio allows, but one more was to be "
                f"dropped as {verdict.category}/{verdict.reason} ({numbers}). {self._tally.why(self._first_details)} - loosen the filter "
                "that drops most, raise guard.max_filter_ratio, or set guard.policy to keep, wait or shrink",
                now,
                out,
            )
            return None
        return self._kept_by_guard(verdict)

    def _kept_by_guard(self, verdict: Verdict) -> Verdict:
        assert self.guard is not None
        self._tally.guard_kept += 1
        assert verdict.category is not None
        return self.guard.keep_counted(verdict.category)

    def _recheck_held(self, now: float, out: list[ev.Instruction]) -> None:
        """More groups have been judged: the guard may now let go of groups that it held, the oldest first."""
        guard = self.guard
        while self._held and guard is not None:
            open_group, _, verdict = self._held[0]
            assert verdict.category is not None
            assert open_group.guard_ticket is not None
            if not guard.may_drop(verdict.category):
                return
            self._held.popleft()
            guard.filter_counted(open_group.guard_ticket, verdict.category)
            self._drop(open_group, verdict, now, out, goes_on=False)

    def _release_held(self, now: float, out: list[ev.Instruction]) -> None:
        """Nothing else can fill the batch: the oldest group that the guard holds is kept."""
        open_group, group, verdict = self._held.popleft()
        self._commit(open_group, group, Sums.of(group.rollouts), self._kept_by_guard(verdict), now, out)

    def _commit(self, open_group: OpenGroup, group: Group, sums: Sums, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        open_group.reason, open_group.source = verdict.reason, verdict.source
        open_group.evidence = dict(verdict.evidence)
        if not self.buffer.commit(group):
            self._expire(open_group, now, out, is_running=True)
            self._go_on(now, out)
            return
        self._kept += 1
        self._tally.group_kept(group.task.domain, sums)
        open_group.story.append((now, "committed", self.step))
        if self._held:
            self._recheck_held(now, out)
        self._go_on(now, out)

    @property
    def _keeps_spares(self) -> bool:
        return self.config.on_exhausted == "keep_low_information" and self.config.fill == "refill" and self._wanted is not None

    def _is_young(self, group: Group) -> bool:
        """Whether a group may be trained in this step beyond what the buffer holds; of the oldest step only the buffer counts how many."""
        oldest = self.step - self.config.domain_staleness.get(group.task.domain, self.config.staleness)
        started = min(group.start_step, group.policy_version)
        return started > oldest or (started == oldest and not self.config.async_generation_ratio % 1.0)

    def _put_aside(self, open_group: OpenGroup, group: Group, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """Dropped for low information, but held until the batch is full: it may be needed to top it up. The latest ones are held."""
        self.buffer.abort(open_group.group_id, verdict)
        open_group.story.append((now, f"dropped ({verdict.reason}), held in reserve", self.step))
        self._spare.append((open_group, group, verdict))
        if len(self._spare) > self._requested:
            oldest, _, its_verdict = self._spare.popleft()
            self._leave(oldest, "dropped", its_verdict, now, out)
        self._owe_replacement(open_group, verdict, out)
        self._go_on(now, out)

    def _drop(
        self,
        group: OpenGroup,
        verdict: Verdict,
        now: float,
        out: list[ev.Instruction],
        *,
        is_lost: bool = False,
        is_failure: bool = False,
        is_replaced: bool = True,
        goes_on: bool = True,
    ) -> None:
        """The group leaves by verdict; by setting a group of the next round takes its place.

        is_lost: nothing judged it, since machinery broke; its prompt may come back. is_failure: it counts towards quarantine.
        """
        self.buffer.abort(group.group_id, verdict)
        group.story.append((now, f"dropped ({verdict.reason})", self.step))
        self._leave(group, "dropped", verdict, now, out)
        if is_failure and self.prompts.lost(group.task, group.epoch, verdict.reason):
            message = (
                f"task {group.task.task_id!r} (domain {group.task.domain!r}) is in quarantine: {self.config.quarantine_after} of its groups"
            )
            out.append(
                ev.Warn(key="quarantine", message=f"{message} in a row were lost, the last one as {verdict.reason} - it is not drawn again")
            )
        elif is_lost and self.prompts.may_come_back(group.task, group.epoch):
            self.prompts.later.append((group.task, group.epoch))
        if is_replaced:
            self._owe_replacement(group, verdict, out)
        else:
            self._tally.group_dropped(str(verdict.category), verdict.reason)
            if self._wanted is not None and self._wanted > 1:  # a batch of none is no batch
                self._wanted -= 1
                self.buffer.close_batch(1)
        if goes_on:
            if self._held:
                self._recheck_held(now, out)
            self._go_on(now, out)

    def _release_spares(self, now: float, out: list[ev.Instruction]) -> None:
        """No batch will be topped up with them."""
        for group, _, verdict in self._spare:
            self._leave(group, "dropped", verdict, now, out)
        self._spare.clear()

    def _owe_replacement(self, group: OpenGroup, verdict: Verdict, out: list[ev.Instruction]) -> None:
        tally, wanted = self._tally, self._requested
        tally.group_dropped(str(verdict.category), verdict.reason)
        if self._wanted is None and not self.config.is_async:
            return
        if self.config.fill == "refill" and group.round < self.config.max_resample_rounds:
            self._owe(group, group.round + 1)
        if self._wanted is not None and not tally.kept and tally.dropped == NOTHING_KEPT_BATCHES * wanted:
            message = (
                f"step {self.step}: {tally.dropped} groups were dropped for this batch and none has been kept so far. "
                f"{tally.why(self._first_details)} - {tally.advice('go on', self._first_details)}"
            )
            out.append(ev.Warn(key="nothing_kept", message=message))

    def _owe(self, group: OpenGroup, round_number: int) -> None:
        """A group has left: another one may take its place."""
        self.slots.owe_again(group.slot, round_number)

    def _abandon(self, group: OpenGroup, outcome: str, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A running group is stopped before it was judged; its task goes back to the source."""
        self.buffer.abort(group.group_id, verdict)
        group.story.append((now, f"abandoned ({verdict.reason})", self.step))
        self._return(group.task, group.epoch, out)
        self._leave(group, outcome, verdict, now, out)

    def _expire(self, group: OpenGroup, now: float, out: list[ev.Instruction], *, is_running: bool = False) -> None:
        """A group has become too old. Its place is owed again; is_running: in the next round, since no step bounds this."""
        self._tally.group_dropped("expired", "stale")
        self._give_up(group, "expired", STALE, now, out)
        if self.config.fill == "refill" and (self._wanted is not None or self.config.is_async):
            round_number = group.round + is_running
            if round_number <= self.config.max_resample_rounds:
                self._owe(group, round_number)

    def _give_up(self, group: OpenGroup, outcome: str, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A group that the buffer has let go leaves; its prompt comes back once."""
        group.story.append((now, f"{outcome} ({verdict.reason})", self.step))
        if self.prompts.may_come_back(group.task, group.epoch):
            self._return(group.task, group.epoch, out)
        self._leave(group, outcome, verdict, now, out)

    def _leave(self, group: OpenGroup, outcome: str, verdict: Verdict | None, now: float, out: list[ev.Instruction]) -> None:
        """Set the one outcome of a group, cancel what still runs for it, and write its record when the last attempt is settled."""
        group.outcome = outcome
        group.end_step = self.step
        if verdict is not None:
            group.reason, group.source = verdict.reason, verdict.source
            group.category = verdict.category if outcome == "dropped" else None
            group.evidence = dict(verdict.evidence)
        if not group.closed:
            self._close(group, out)
        open_members = len(group.delivered) - group.delivered.count(None)
        if open_members:
            self.ledger.members_left("discarded" if outcome == "cancelled" else outcome, open_members, group.open_tokens)
        self.ledger.group_left(outcome, group.category, group.reason)
        self._record_if_settled(group, now, out)

    def _record_if_settled(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        if group.running or group.outcome is None:
            return
        del self._groups[group.group_id]
        out.append(ev.RecordGroup(record=group.record(now)))

    # ------------------------------------------------------------ user-defined loops

    def _loop_attempt(self, event: ev.LoopAttempt, now: float, out: list[ev.Instruction]) -> None:
        group, index = self._groups.get(event.group_id), event.member_index
        if group is None or group.closed:
            out.append(ev.AttemptRefused(group_id=event.group_id, member_index=index, reason="group_closed"))
            return
        if not group.has_loop:
            raise SchedulerBug(f"LoopAttempt for a group that no loop owns\n{group.tell()}")
        if not 0 <= index < len(group.slots):
            raise LoopError(f"expected a member_index from 0 to {len(group.slots) - 1}, got {index}\n{group.tell()}")
        if group.slots[index] >= 0:
            raise LoopError(f"member {index} is being generated - wait for it, or start another member\n{group.tell()}")
        if group.tries[index] >= self.config.max_response_rounds:
            out.append(ev.AttemptRefused(group_id=event.group_id, member_index=index, reason="response_retries"))
            return
        earlier = group.delivered[index]
        if earlier is not None:  # the loop does not want what it got
            self._take_out(group, index, "loop_rejected", now)
        self._launch(group, index, now, out)

    def _take_out(self, group: OpenGroup, index: int, reason: str, now: float) -> None:
        """A delivered member leaves its group."""
        rollout = group.delivered[index]
        assert rollout is not None
        tokens = rollout.sampled_tokens
        group.delivered[index] = None
        group.missing += 1
        group.open_tokens -= tokens
        group.rejections[index] += 1
        group.story.append((now, f"rejected ({reason})", index))
        self.ledger.members_left("rejected", 1, tokens)
        self.ledger.member_rejected(reason)
        self._tally.member_rejected(reason)

    def _group_returned(self, event: ev.GroupReturned, now: float, out: list[ev.Instruction]) -> None:
        group = self._groups.get(event.group_id)
        if group is None or group.closed:
            self.ledger.late_results += 1
            return
        if not group.has_loop:
            raise SchedulerBug(f"GroupReturned for a group that no loop owns\n{group.tell()}")
        group.has_loop = False
        if event.rollouts is None:
            reason = event.reason or "loop_returned_none"
            self._tell_of_loop(group, reason, event.detail, out)
            self._drop(group, Verdict.dropped(reason, "invalid", "loop"), now, out, is_lost=group.had_fault, is_failure=True)
            return
        self._check_returned(group, event.rollouts)
        returned = {rollout.member_index: rollout for rollout in event.rollouts}
        for index, rollout in enumerate(group.delivered):
            if rollout is not None and index not in returned:
                self._take_out(group, index, "loop_left_out", now)
        for index, rollout in returned.items():
            group.delivered[index] = rollout
            group.counted[index] = rollout.finish_reason != "length" or self.config.truncated != "mask"
        count = len(returned)
        if not self._is_whole(group, count):
            if event.judged is not None and not event.judged.keep:
                self._drop_partial(group, event.judged, now, out)
                return
            size = self.config.group_size
            detail = (
                f"got {count} rollouts where {size} were expected - return them all, or None to give the group up; with "
                "is_use_additional_prompts any number from min_members on is a group"
            )
            self._tell_of_loop(group, "response_count", detail, out)
            evidence = {"returned": float(count), "expected": float(size)}
            self._drop(group, Verdict.dropped("response_count", "invalid", "loop", evidence), now, out, is_failure=True)
            return
        if event.judged is None:
            self._judge(group, now, out)
            return
        members = [index for index, rollout in enumerate(group.delivered) if rollout is not None]
        whole = _group(group, tuple([returned[index] for index in members]), tuple([group.counted[index] for index in members]))
        self._decide(group, whole, event.judged, now, out)

    def _is_whole(self, group: OpenGroup, count: int) -> bool:
        """Whether so many returned members make a group: all of them, or, where fewer will do, as many as could be had."""
        if count == self.config.group_size:
            return True
        if count < self._needed_members:
            return False
        rounds = self.config.max_response_rounds
        lost = sum([rollout is None and tries >= rounds for rollout, tries in zip(group.delivered, group.tries, strict=True)])
        could_be_had = len(group.slots) - lost
        return self.config.max_additional_running_prompts > 0 or count == could_be_had < self.config.group_size

    def _drop_partial(self, group: OpenGroup, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A loop's own drop of members that are no whole group: no guard can keep them, nor can they top up a batch."""
        assert verdict.category is not None
        self.prompts.judged(group.task.task_id)
        self._judged += 1
        self._tally.group_judged(group.task.domain)
        if self.guard is not None:
            self.guard.filter_counted(self.guard.count(), verdict.category)
        self._drop(group, verdict, now, out)

    def _tell_of_loop(self, group: OpenGroup, reason: str, detail: str, out: list[ev.Instruction]) -> None:
        """Why a loop's group is given up: the first of each kind in words; the others are counted."""
        key = (group.task.domain, reason)
        if detail and key not in self._first_details:
            self._first_details[key] = detail
            message = f"a rollout loop's group is given up as {reason}: {detail} (told once, counted from here on)\n{group.tell()}"
            out.append(ev.Warn(key="/".join(key), message=message))

    def _check_returned(self, group: OpenGroup, rollouts: Iterable[Rollout]) -> None:
        """Raise `LoopError` unless these are members that were delivered, each once."""
        seen: set[int] = set()
        for rollout in rollouts:
            index = rollout.member_index
            known = group.delivered[index] if 0 <= index < len(group.delivered) else None
            is_ours = known is not None and known.attempt_id == rollout.attempt_id and rollout.group_id == group.group_id
            if not is_ours or rollout.task_id != group.task.task_id or index in seen:
                raise LoopError(
                    f"a rollout loop must return rollouts of its own group {group.group_id}, each member once, as its context delivered "
                    f"them; got attempt {rollout.attempt_id} of group {rollout.group_id}, member {index}, task {rollout.task_id!r}\n"
                    + group.tell()
                )
            assert known is not None
            if rollout.turns != known.turns or rollout.finish_reason != known.finish_reason:  # turns are compared by identity
                raise LoopError(
                    f"a rollout loop may change rewards and metrics, not what was sampled: the turns of member {index} of group "
                    f"{group.group_id} ({known.sampled_tokens} sampled tokens, {known.finish_reason!r}) came back as others "
                    f"({rollout.sampled_tokens}, {rollout.finish_reason!r}) - use dataclasses.replace(rollout, reward=...)\n{group.tell()}"
                )
            if rollout.reward is not None and not math.isfinite(rollout.reward):
                raise LoopError(
                    f"expected a finite reward, or None, of member {index} of group {group.group_id}, got {rollout.reward!r} - a rollout "
                    f"without a reward has None\n{group.tell()}"
                )
            seen.add(index)

    # ------------------------------------------------------------ steps, weights, time and the end

    def _step_advanced(self, event: ev.StepAdvanced, now: float, out: list[ev.Instruction]) -> None:
        if event.step <= self.step:
            raise SchedulerBug(f"StepAdvanced({event.step}): steps only go forward, the run is at {self.step}")
        if self._wanted is not None:
            raise SchedulerBug(f"StepAdvanced({event.step}) while the batch of step {self.step} is still being filled")
        for group in self._delivered:
            self._leave(group, "trained", None, now, out)
        self._delivered = []
        self.step = event.step
        self.buffer.step_to(event.step)
        self.ledger.trained_usefully(event.useful_groups, event.useful_tokens)
        if self.config.is_async or self.buffer.committed:
            self._collect_garbage(now, out)
            self._go_on(now, out)

    def _collect_garbage(self, now: float, out: list[ev.Instruction]) -> None:
        running, committed = self.buffer.gc()
        for group_id in running:
            self._expire_judged_too(self._groups[group_id], now, out)
        for group in committed:
            self._expire(self._groups[group.group_id], now, out)

    def _expire_judged_too(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        if group.closed:  # the guard holds it
            self._held = deque([entry for entry in self._held if entry[0] is not group])
        self._expire(group, now, out)

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

    def _arm(self, out: list[ev.Instruction]) -> None:
        """Ask to be woken at the next deadline."""
        when = next(iter(self._deadlines.values()), math.inf)
        if self.config.stall_warning_s is not None and self._wanted is not None and not self._is_stall_told:
            when = min(when, self._progress_at + self.config.stall_warning_s)
        if when < self._wake_at:
            self._wake_at = when
            out.append(ev.WakeAt(when=when))

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


def _without_reward(rollout: Rollout) -> Rollout:
    """A rollout whose reward is no number: it has none."""
    failure = Failure(cause="infrastructure", reason="reward_missing", detail=f"its reward is {rollout.reward}")
    return replace(rollout, reward=None, failure=rollout.failure or failure)


def _group(open_group: OpenGroup, rollouts: tuple[Rollout, ...], counted: tuple[bool, ...]) -> Group:
    return Group(
        group_id=open_group.group_id,
        task=open_group.task,
        rollouts=rollouts,
        start_step=open_group.start_step,
        round=open_group.round,
        epoch=open_group.epoch,
        counted=counted,
    )


_DRAW: Final = ev.DrawTask()
_MEMBER_KEPT: Final = Verdict.kept("scheduler")
