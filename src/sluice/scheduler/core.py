"""What the machine knows: its state, what can be asked of it, and what all its parts use."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sluice.filters import DomainFilters
from sluice.ledger import Ledger
from sluice.scheduler import events as ev
from sluice.scheduler import state, watch
from sluice.scheduler.buffer import ReplayBuffer
from sluice.scheduler.groups import OpenGroup
from sluice.scheduler.prompts import Prompts
from sluice.scheduler.slots import ClosedPlace, Mix, Slots
from sluice.scheduler.tally import Tally
from sluice.types import Failure, Group, Task, Verdict

if TYPE_CHECKING:
    from sluice.filters import RatioGuard
    from sluice.scheduler.gating import MachineGate
from sluice.scheduler.settings import SchedulerConfig

# Reasons for which a group is given up. Nothing judged it, so that no category is recorded for it.
CANCELLED_BATCH_FULL: Final = Verdict.dropped("batch_full", "low_information", "scheduler")
SHUTDOWN: Final = Verdict.dropped("shutdown", "low_information", "scheduler")
STALE: Final = Verdict.dropped("stale", "invalid", "scheduler")
HELD_BY_GUARD: Final = Verdict.dropped("held_by_guard", "low_information", "ratio_guard")
OVERFLOW: Final = Verdict.dropped("domain_full", "low_information", "scheduler")


class Core(ABC):
    """What the machine knows, and what can be asked of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        filters: Mapping[str, DomainFilters],
        ledger: Ledger | None = None,
        guard: RatioGuard | None = None,
        gate: MachineGate | None = None,
    ) -> None:
        """guard: bounds the share of judged groups that filters may drop; None: no bound. gate: decides on running groups; None: nobody."""
        self.config = config
        self.filters = filters
        self.guard = guard
        self.gate = gate
        # By domain, where a single member can decide about its group, and nothing unforeseeable has a say in the verdict.
        self._disqualifying = {
            domain: pair.query for domain, pair in filters.items() if pair.query.can_disqualify and not pair.query.is_opaque
        }
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
        # Of the batch that is filled, or trained; after a restart, of the one that is asked for again. None: there is no such batch.
        self._closed: list[ClosedPlace] | None = None
        self._closed_ahead: list[ClosedPlace] = []  # of later batches
        self._delivered: list[OpenGroup] = []  # of the batch that is being trained
        self._spare: deque[tuple[OpenGroup, Group, Verdict]] = deque()  # dropped for low information, kept in reserve for the batch
        self._held: deque[tuple[OpenGroup, Group, Verdict]] = deque()  # the guard does not let them go yet
        self._ended: set[str | None] = set()  # domains (None: all) of which the source had nothing left when it was last asked
        self._excused: set[str | None] = set()  # of these, at some time of this batch: it does not insist on its share of them
        self._is_quarantined_out = False  # the source has only prompts in quarantine left
        self._stale_draws = 0  # open draws asked for before a prompt was put back: that nothing is left for them does not say much
        self._skipped: Counter[str | None] = Counter()  # new prompts in quarantine, one after another, by the domain asked for
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
        if self.gate is not None:
            out |= self.gate.metrics(self.ledger.tokens_per_env_step)
        out["scheduler/expired_groups"] = float(self.buffer.expired)
        out["scheduler/requeued_prompts"] = float(self.prompts.requeued)
        out["scheduler/quarantined_prompts"] = float(len(self.prompts.quarantined))
        out["scheduler/late_results"] = float(self.ledger.late_results + self.buffer.late_transactions)
        return out

    def state_dict(self, in_flight: Mapping[int, int] | None = None, now: float | None = None) -> dict[str, Any]:
        """Everything that a later process needs to go on; this machine is not changed. Plain data and numpy arrays.

        Committed groups are in it whole. Running groups are not: they are accounted for as cancelled, and their prompts are listed under
        "outstanding", to be drawn first. in_flight: attempt_id -> tokens sampled so far, for every running attempt (missing ones: 0).
        now: seconds of the machine's clock, for the records of the groups that are interrupted.
        """
        return state.save(self, {} if in_flight is None else in_flight, now)

    def load_state_dict(self, saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> list[ev.Instruction]:
        """In a fresh machine: go on where `saved` was taken. tasks: by task_id. Returns what has to be written down about it.

        Raises `RecordError` for a state that is torn or does not fit.
        """
        return state.load(self, saved, tasks)

    # ------------------------------------------------------------ what all its parts use

    @abstractmethod
    def _go_on(self, now: float, out: list[ev.Instruction]) -> None:
        """Launch what may be launched, deliver what is full, act on the bound: called after everything that changes the buffer."""

    @abstractmethod
    def _fail(self, message: str, now: float, out: list[ev.Instruction]) -> None:
        """The batch cannot be filled."""

    @property
    def _prepares(self) -> bool:
        """Whether groups are launched while no batch is wanted."""
        return self.config.is_async and self._batches_left != 0

    @property
    def _needed_members(self) -> int:
        return self.config.group_size if self.config.min_members is None else self.config.min_members

    def _window_end(self) -> int:
        """First ticket behind the batch being filled."""
        return self.slots.base + self._requested

    def _kept_now(self) -> int:
        """Committed groups that the batch being filled may take."""
        if not self.config.goes_by_ticket:
            return self.buffer.committed
        end = self._window_end()
        return sum([self._groups[group.group_id].slot.ticket < end for group in self.buffer.groups()])

    def _waits_for_weights(self) -> bool:
        """Whether a group launched now would be too old for the step that it is launched in."""
        return self.version is not None and self.version < self.step - self._least_staleness

    def _is_dry(self) -> bool:
        """Whether the source had nothing left when it was last asked."""
        mix = self.slots.mix
        return bool(self._ended) and (None in self._ended or (mix is not None and self._ended.issuperset(mix.domains)))

    def _note(self, group: OpenGroup, failure: Failure, out: list[ev.Instruction]) -> None:
        """Tell the user the first failure of each kind in words; the others are counted."""
        key = (group.task.domain, failure.reason)
        if key not in self._first_details:
            self._first_details[key] = failure.detail
            message = f"domain {group.task.domain!r}: {failure.reason} for an attempt at task {group.task.task_id!r}: {failure.detail}"
            out.append(ev.Warn(key="/".join(key), message=f"{message} (told once, counted from here on)"))

    def _return(self, task: Task, epoch: int, out: list[ev.Instruction]) -> None:
        out.append(ev.ReturnTask(task=task, epoch=epoch))
        self.prompts.back.add((task.task_id, epoch))
        self._stale_draws = len(self.slots.draws)
        self._is_quarantined_out = False
        self._ended.discard(None)
        self._ended.discard(task.domain)

    def _return_later(self, out: list[ev.Instruction]) -> None:
        for task, epoch in self.prompts.later:
            self._return(task, epoch, out)
        self.prompts.later.clear()

    def _arm(self, out: list[ev.Instruction]) -> None:
        """Ask to be woken at the next deadline."""
        when = next(iter(self._deadlines.values()), math.inf)
        if self.config.stall_warning_s is not None and self._wanted is not None and not self._is_stall_told:
            when = min(when, self._progress_at + self.config.stall_warning_s)
        if when < self._wake_at:
            self._wake_at = when
            out.append(ev.WakeAt(when=when))
