"""The machine: it decides which groups to launch, replace, accept, cancel and deliver. Event in, instructions out; it never waits.

How a batch is filled (`BatchWanted(n)`): n groups are launched (round 1). A group whose members have all delivered is judged once; a
dropped one is replaced at once by a new group of the next round, until n are committed. Then the batch is delivered whole and everything
still running is cancelled. Every bound ends in `on_exhausted`: raise, shrink, or top up with dropped low-information groups.

Invariants: every attempt ends once, every launched group leaves once, what a batch holds is whole groups of distinct members, and running
plus committed groups never exceed what the open batch needs plus `max_additional_running_prompts`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sluice.errors import FilterError, SchedulerBug
from sluice.filters import DomainFilters
from sluice.ledger import Ledger
from sluice.scheduler import events as ev
from sluice.scheduler.buffer import ReplayBuffer
from sluice.scheduler.groups import OpenGroup, scramble
from sluice.types import Batch, Failure, Group, Rollout, TruncatedPolicy, Verdict

EMPTY_BATCHES_IN_A_ROW: Final = 3  # batches of which nothing was kept, after which the run is an error whatever the policy
SMOOTHING: Final = 8.0  # judged groups that a perfect acceptance is worth before anything is measured: no over-launch on thin evidence
NOTHING_KEPT_BATCHES: Final = 3  # so many times the batch dropped in a row without a keep: worth a warning before the bound acts
TOP_REASONS: Final = 5  # reasons that an exhaustion message names

# Reasons for which a running group is abandoned. Nothing judged it, so that no category is recorded for it.
CANCELLED_BATCH_FULL: Final = Verdict.dropped("batch_full", "low_information", "scheduler")
SHUTDOWN: Final = Verdict.dropped("shutdown", "low_information", "scheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of the machine, as it uses them."""

    group_size: int
    seed: int = 0
    fill: Literal["refill", "shrink"] = "refill"
    max_resample_rounds: int = 10  # round 1 is the groups asked for
    max_groups_per_batch: int | None = None
    max_response_rounds: int = 5  # the first generation and the rounds of replacing members
    on_exhausted: Literal["raise", "shrink", "keep_low_information"] = "raise"
    min_members: int | None = None  # None: group_size
    truncated: TruncatedPolicy = "mask"
    max_additional_running_prompts: int = 0  # groups beyond the batch that may run at once; 0 without is_use_additional_prompts

    def __post_init__(self) -> None:
        for name in ("group_size", "max_resample_rounds", "max_response_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"SchedulerConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.min_members is not None and not 1 <= self.min_members <= self.group_size:
            raise ValueError(f"SchedulerConfig.min_members must lie between 1 and group_size ({self.group_size}), got {self.min_members}")
        if self.max_groups_per_batch is not None and self.max_groups_per_batch < 1:
            raise ValueError(f"SchedulerConfig.max_groups_per_batch must be at least 1 or None, got {self.max_groups_per_batch}")


class _Filling:
    """The batch being filled."""

    __slots__ = (
        "ahead",
        "draws",
        "dropped",
        "empty_tries",
        "judged",
        "kept",
        "launched",
        "launched_before",
        "members",
        "owed",
        "reasons",
        "reward_kept",
        "reward_launched",
        "topped_up",
        "wanted",
    )

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.owed: deque[int] = deque([1] * wanted)  # rounds of the groups that may still be launched
        self.draws: deque[int] = deque()  # rounds of the draws under way
        self.launched = 0
        self.launched_before = 0  # of these, in tries of which nothing was kept
        self.empty_tries = 0
        self.topped_up = 0  # low-information groups that were used after all
        self.ahead = 0  # groups launched beyond those asked for
        self.judged = 0
        self.kept = 0
        self.dropped = 0
        self.members: dict[str, int] = {}  # reason -> members taken out of their group
        self.reasons: dict[tuple[str, str], int] = {}  # (category, reason) -> groups
        self.reward_launched: list[float] = [0.0, 0.0]  # sum and number of rewards of judged groups
        self.reward_kept: list[float] = [0.0, 0.0]

    def use_after_all(self, group: Group, verdict: Verdict) -> None:
        """A group that was dropped for this batch tops it up: it counts as kept."""
        self.dropped -= 1
        self.reasons[str(verdict.category), verdict.reason] -= 1
        self.kept += 1
        self.topped_up += 1
        self.reward_kept[0] += sum([rollout.reward for rollout in group.rollouts if rollout.reward is not None])
        self.reward_kept[1] += len(group.rollouts)

    def try_again(self) -> None:
        """Nothing was kept: begin anew, what was counted stays counted."""
        self.owed = deque([1] * self.wanted)
        self.launched_before = self.launched
        self.ahead = 0
        self.empty_tries += 1


class Scheduler:
    """Fills batches with whole, judged groups. `handle(event, now)` returns what to do next; time is passed in, in seconds."""

    def __init__(self, config: SchedulerConfig, filters: Mapping[str, DomainFilters], ledger: Ledger | None = None) -> None:
        self.config = config
        self.filters = filters
        self.ledger = Ledger() if ledger is None else ledger
        self.buffer = ReplayBuffer(max_additional_running_prompts=config.max_additional_running_prompts)
        self.step = 0
        self._running: dict[int, OpenGroup] = {}  # attempt_id -> its group
        self._groups: dict[int, OpenGroup] = {}  # launched, not left
        self._next_attempt = 0
        self._next_group = 0
        self._filling: _Filling | None = None
        self._delivered: list[OpenGroup] = []  # of the batch that is being trained
        self._spare: deque[tuple[OpenGroup, Group, Verdict]] = deque()  # dropped for low information, kept in reserve for the batch
        self._tasks_ended = False  # the source had nothing left when it was last asked
        self._stray_draws = 0  # draws that were under way when their batch was delivered
        self._stopped = False
        self._empty_in_a_row = 0
        self._first_details: dict[tuple[str, str], str] = {}  # (domain, reason of failure) -> the first one, in words
        self._judged = 0  # groups judged since the start
        self._kept = 0
        self._handlers: dict[type, Callable[[Any, float, list[ev.Instruction]], None]] = {
            ev.BatchWanted: self._batch_wanted,
            ev.TaskDrawn: self._task_drawn,
            ev.TasksExhausted: self._tasks_exhausted,
            ev.MemberFinished: self._member_finished,
            ev.MemberFailed: self._member_failed,
            ev.MemberCancelled: self._member_cancelled,
            ev.LateTokens: self._late_tokens,
            ev.StepAdvanced: self._step_advanced,
            ev.Shutdown: self._shutdown,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event, at `now` seconds, and answer with the instructions that follow from it, in order.

        Raises `SchedulerBug` for an event that cannot be, with the story of the group, and `FilterError` when a filter cannot judge.
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
        return None if self._filling is None else (self.buffer.committed, self._filling.wanted)

    @property
    def acceptance_rate(self) -> float | None:
        """Kept / judged groups since the start; None: nothing judged yet."""
        return self._kept / self._judged if self._judged else None

    def story(self, group_id: int) -> str:
        """The story of an open group."""
        group = self._groups.get(group_id)
        return f"group {group_id} is not open" if group is None else group.tell()

    # ------------------------------------------------------------ the batch

    def _batch_wanted(self, event: ev.BatchWanted, now: float, out: list[ev.Instruction]) -> None:
        if event.groups < 1:
            raise SchedulerBug(f"BatchWanted.groups must be at least 1, got {event.groups}")
        if self._filling is not None:
            raise SchedulerBug(f"BatchWanted while a batch of {self._filling.wanted} groups is still being filled - wait for DeliverBatch")
        if self._delivered:
            raise SchedulerBug("BatchWanted before StepAdvanced: the groups of the last batch have not been accounted for")
        if self._stopped:
            raise SchedulerBug("BatchWanted after Shutdown")
        self._open_batch(event.groups)
        self._go_on(now, out)

    def _open_batch(self, wanted: int) -> None:
        self._filling = _Filling(wanted)
        self.buffer.advance_step(self.step, wanted)

    def _close_filling(self, filling: _Filling) -> None:
        self._stray_draws += len(filling.draws)
        self._filling = None

    def _go_on(self, now: float, out: list[ev.Instruction]) -> None:
        """Launch what may be launched, deliver what is full, act on the bound: called after everything that changes the buffer."""
        filling = self._filling
        if filling is None:
            return
        if self.config.fill == "refill" and self.buffer.committed >= filling.wanted:
            self._deliver(now, out)
            return
        self._draw(filling, out)
        if self.buffer.running == 0 and not filling.draws:  # nothing is under way and nothing may be launched
            if self.config.fill == "shrink" and not self._tasks_ended and self.buffer.committed:
                self._deliver(now, out)
            else:
                self._exhausted(filling, now, out)

    def _draw(self, filling: _Filling, out: list[ev.Instruction]) -> None:
        if self._tasks_ended:
            return
        limit = self.config.max_groups_per_batch
        room = self.buffer.poll() - len(filling.draws)
        target = filling.wanted - self.buffer.committed
        if self.config.max_additional_running_prompts and self.config.fill == "refill":
            target = math.ceil(target * (self._judged + SMOOTHING) / (self._kept + SMOOTHING))
        room = min(room, target - self.buffer.running - len(filling.draws))
        while room > 0 and (limit is None or filling.launched - filling.launched_before + len(filling.draws) < limit):
            if filling.owed:
                number = filling.owed.popleft()
            elif filling.ahead < self.config.max_additional_running_prompts and self.config.fill == "refill":
                filling.ahead += 1  # launched ahead of a drop that the acceptance rate foretells
                number = 1
            else:
                break
            filling.draws.append(number)
            out.append(_DRAW)
            room -= 1

    def _task_drawn(self, event: ev.TaskDrawn, now: float, out: list[ev.Instruction]) -> None:
        if self._stray_draws:
            self._stray_draws -= 1
            out.append(ev.ReturnTask(task=event.task, epoch=event.epoch))  # its batch was filled meanwhile
            return
        filling = self._filling
        if filling is None or not filling.draws:
            raise SchedulerBug(f"TaskDrawn ({event.task.task_id!r}) without a DrawTask")
        round_number = filling.draws.popleft()
        if event.task.domain not in self.filters:
            raise SchedulerBug(f"task {event.task.task_id!r} has domain {event.task.domain!r}, known are {sorted(self.filters)}")
        filling.launched += 1
        group_id = self._next_group
        self._next_group += 1
        self.buffer.begin(group_id)
        self.ledger.groups_launched += 1
        size = self.config.group_size
        group = OpenGroup(
            group_id=group_id,
            task=event.task,
            epoch=event.epoch,
            round_number=round_number,
            start_step=self.step,
            size=size,
            seed=self.config.seed,
            now=now,
        )
        self._groups[group_id] = group
        for member_index in range(size):
            self._launch(group, member_index, now, out)

    def _tasks_exhausted(self, event: ev.TasksExhausted, now: float, out: list[ev.Instruction]) -> None:
        if self._stray_draws:
            self._stray_draws -= 1
            return  # whoever asks next is told again
        filling = self._filling
        if filling is None or not filling.draws:
            raise SchedulerBug("TasksExhausted without a DrawTask")
        filling.draws.popleft()
        self._tasks_ended = True
        self._go_on(now, out)

    def _deliver(self, now: float, out: list[ev.Instruction], is_last: bool = False, top_up: bool = False) -> None:
        filling = self._filling
        assert filling is not None
        taken = self.buffer.get_batch(filling.wanted)
        groups = [self._groups[group.group_id] for group in taken]
        while top_up and self._spare and len(taken) < filling.wanted:
            open_group, group, verdict = self._spare.popleft()
            filling.use_after_all(group, verdict)
            open_group.reason, open_group.source = verdict.reason, "on_exhausted"
            taken.append(group)
            groups.append(open_group)
        self.buffer.close_batch(self.buffer.quota)  # synchronous: the next batch opens its own
        for open_group, _, verdict in self._spare:
            self._leave(open_group, "dropped", verdict, now, out)
        self._spare.clear()
        self._close_filling(filling)
        self._empty_in_a_row = 0
        self._delivered = groups
        batch = Batch(groups=tuple(taken), requested=filling.wanted, step=self.step, is_last=is_last)
        for surplus in self.buffer.take_all():
            self._leave(self._groups[surplus.group_id], "surplus", None, now, out)
        for open_group in list(self._groups.values()):
            if open_group.outcome is None and open_group.missing:
                self._abandon(open_group, "cancelled", CANCELLED_BATCH_FULL, now, out)
        out.append(ev.DeliverBatch(batch=batch, metrics=self._batch_metrics(filling, batch)))

    def _exhausted(self, filling: _Filling, now: float, out: list[ev.Instruction]) -> None:
        """Nothing runs and nothing may be launched, and the batch is short."""
        kept = self.buffer.committed
        if self._tasks_ended:
            self._deliver(now, out, is_last=True)
            return
        policy = "shrink" if self.config.fill == "shrink" else self.config.on_exhausted
        if policy == "keep_low_information" and kept + len(self._spare):
            self._deliver(now, out, top_up=True)
            return
        if policy != "raise" and kept:
            self._deliver(now, out)
            return
        if policy != "raise":
            self._empty_in_a_row += 1
            if self._empty_in_a_row < EMPTY_BATCHES_IN_A_ROW:
                message = f"no group of {filling.judged} judged was kept: no optimiser step ({self._empty_in_a_row} such batch in a row)"
                out.append(ev.Warn(key="empty_batch", message=f"{message}. {self._why(filling)}"))
                filling.try_again()
                self._go_on(now, out)
                return
        message = self._exhaustion_message(filling, kept, policy)
        self._close_filling(filling)
        self.buffer.close_batch(filling.wanted - kept)  # what is kept stays for whoever asks again
        out.append(ev.Fail(message=message))

    def _exhaustion_message(self, filling: _Filling, kept: int, policy: str) -> str:
        limit = self.config.max_groups_per_batch
        if policy != "raise":
            bound = f"{EMPTY_BATCHES_IN_A_ROW} batches in a row kept nothing"
        elif limit is not None and filling.launched - filling.launched_before >= limit:
            bound = f"resampling.max_groups_per_batch ({limit}) is reached"
        else:
            bound = f"resampling.max_resample_rounds ({self.config.max_resample_rounds}) is reached"
        rate = kept / filling.judged if filling.judged else 0.0
        return (
            f"step {self.step}: expected a batch of {filling.wanted} groups, kept {kept} of {filling.judged} judged "
            f"(acceptance rate {rate:.1%}), and {bound}. {self._why(filling)} - {self._advice(filling, policy)}"
        )

    def _advice(self, filling: _Filling, policy: str) -> str:
        """What to change, by what dropped the groups."""
        advice = []
        reasons = {reason for _, reason in filling.reasons}
        if "low_information" in {category for category, _ in filling.reasons}:
            advice.append("loosen the filter that drops most, or choose easier or harder prompts")
        if "truncated" in reasons or "truncated" in filling.members:
            advice.append("raise response_length, or set resampling.truncated to 'keep'")
        if any(reason in filling.members for _, reason in self._first_details):
            advice.append("put the verifier or the engine right")
        elif filling.members and filling.members.keys() != {"truncated"}:
            advice.append("loosen the response filter, or raise resampling.max_response_rounds")
        if policy == "raise":
            advice.append("raise the bound, or set resampling.on_exhausted to 'shrink' or 'keep_low_information'")
        return "; ".join(advice) or "look at the data and the filters"

    def _why(self, filling: _Filling) -> str:
        groups = sorted(filling.reasons.items(), key=lambda item: -item[1])[:TOP_REASONS]
        text = "Groups dropped: " + (", ".join(f"{category}/{reason} {count}" for (category, reason), count in groups) or "none")
        members = sorted(filling.members.items(), key=lambda item: -item[1])[:TOP_REASONS]
        if members:
            text += "; responses rejected: " + ", ".join(f"{reason} {count}" for reason, count in members)
        for (domain, reason), detail in self._first_details.items():
            if reason in filling.members and detail:
                text += f"; first {reason} in domain {domain!r}: {detail}"
        return text

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
        """Group and member of a running attempt, which ends; None: it had ended before. Raises for an id never given out."""
        group = self._running.pop(attempt_id, None)
        if group is None:
            if not 0 <= attempt_id < self._next_attempt:
                raise SchedulerBug(f"attempt {attempt_id} was never launched (the last one is {self._next_attempt - 1})")
            return None
        index = group.slots.index(attempt_id)
        group.slots[index] = -1
        group.running -= 1
        return group, index

    def _member_finished(self, event: ev.MemberFinished, now: float, out: list[ev.Instruction]) -> None:
        rollout = event.rollout
        attempt_id = rollout.attempt_id
        group = self._running.get(attempt_id)
        if group is None:
            self._settle(attempt_id)
            self.ledger.late_results += 1
            return
        index = rollout.member_index
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
        tokens = rollout.sampled_tokens
        is_cancelled = group.outcome is not None
        if rollout.failure is not None and not is_cancelled:
            self._note(group, rollout.failure, out)
        verdict = None if is_cancelled else self._judge_member(group, rollout)
        del self._running[attempt_id]
        group.slots[index] = -1
        group.running -= 1
        group.tokens += tokens
        if is_cancelled:
            self.ledger.attempt_ended("cancelled", tokens)
            self._record_if_settled(group, now, out)
        elif verdict is None:
            group.delivered[index] = rollout
            group.counted[index] = rollout.finish_reason != "length" or self.config.truncated != "mask"
            group.missing -= 1
            group.open_tokens += tokens
            group.story.append((now, "delivered", index))
            self.ledger.member_opened(tokens)
            if not group.missing:
                self._judge(group, now, out)
        else:
            self.ledger.attempt_ended("rejected", tokens, verdict.reason)
            group.rejections[index] += 1
            group.story.append((now, f"rejected ({verdict.reason})", index))
            if self.config.truncated == "drop_group" and verdict.reason == "truncated":
                self._drop(group, verdict, now, out)
            else:
                self._replace(group, index, verdict.reason, now, out)

    def _judge_member(self, group: OpenGroup, rollout: Rollout) -> Verdict | None:
        """A drop, or None when the member stays."""
        if rollout.reward is None or not math.isfinite(rollout.reward):
            reason = rollout.failure.reason if rollout.failure is not None else "reward_missing"
            return Verdict.dropped(reason, "invalid", "scheduler")
        if rollout.finish_reason == "length" and self.config.truncated in ("invalid", "drop_group"):
            return Verdict.dropped("truncated", "invalid", "scheduler")
        response_filter = self.filters[group.task.domain].response
        if response_filter is None:
            return None
        try:
            verdict = response_filter.judge(rollout)
        except Exception as error:
            raise FilterError(f"the response filter of domain {group.task.domain!r} failed: {error}\n{group.tell()}") from error
        return None if verdict.keep else verdict

    def _member_failed(self, event: ev.MemberFailed, now: float, out: list[ev.Instruction]) -> None:
        settled = self._settle(event.attempt_id)
        if settled is None:
            self.ledger.late_results += 1
            return
        group, index = settled
        group.tokens += event.sampled_tokens
        if group.outcome is not None:
            self.ledger.attempt_ended("cancelled", event.sampled_tokens)
            self._record_if_settled(group, now, out)
            return
        failure: Failure = event.failure
        self._note(group, failure, out)
        self.ledger.attempt_ended("failed", event.sampled_tokens, failure.reason)
        group.story.append((now, f"failed ({failure.reason})", index))
        self._replace(group, index, failure.reason, now, out)

    def _member_cancelled(self, event: ev.MemberCancelled, now: float, out: list[ev.Instruction]) -> None:
        group = self._running.get(event.attempt_id)
        if group is not None and group.outcome is None:
            raise SchedulerBug(f"attempt {event.attempt_id} was cancelled without a CancelMember\n{group.tell()}")
        if self._settle(event.attempt_id) is None or group is None:
            return  # it finished while the cancel was on its way, and was settled then
        group.tokens += event.sampled_tokens
        self.ledger.attempt_ended("cancelled", event.sampled_tokens)
        self._record_if_settled(group, now, out)

    def _late_tokens(self, event: ev.LateTokens, now: float, out: list[ev.Instruction]) -> None:
        if not 0 <= event.attempt_id < self._next_attempt or event.attempt_id in self._running:
            raise SchedulerBug(f"LateTokens for attempt {event.attempt_id}, which has not ended")
        self.ledger.tokens_came_late(event.sampled_tokens)

    def _replace(self, group: OpenGroup, member_index: int, reason: str, now: float, out: list[ev.Instruction]) -> None:
        """A member did not deliver: try again within the rounds, else it is lost."""
        if self._filling is not None:
            self._filling.members[reason] = self._filling.members.get(reason, 0) + 1
        if group.tries[member_index] < self.config.max_response_rounds:
            self._launch(group, member_index, now, out)
            return
        group.lost += 1
        group.missing -= 1
        size = self.config.group_size
        needed = size if self.config.min_members is None else self.config.min_members
        if size - group.lost < needed:
            evidence = {"rounds": float(self.config.max_response_rounds), "lost": float(group.lost)}
            self._drop(group, Verdict.dropped("response_retries", "invalid", "scheduler", evidence), now, out)
        elif not group.missing:
            self._judge(group, now, out)

    # ------------------------------------------------------------ groups

    def _judge(self, open_group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        """Every member has delivered or is lost for good: commit or drop."""
        delivered = [(rollout, counted) for rollout, counted in zip(open_group.delivered, open_group.counted, strict=True) if rollout]
        group = Group(
            group_id=open_group.group_id,
            task=open_group.task,
            rollouts=tuple([rollout for rollout, _ in delivered]),
            start_step=open_group.start_step,
            round=open_group.round,
            epoch=open_group.epoch,
            counted=tuple([counted for _, counted in delivered]),
        )
        try:
            verdict = self.filters[open_group.task.domain].query.judge(group)
        except Exception as error:
            raise FilterError(f"the query filter of domain {open_group.task.domain!r} failed: {error}\n{open_group.tell()}") from error
        filling = self._filling
        self._judged += 1
        total = sum([rollout.reward for rollout in group.rollouts if rollout.reward is not None])
        if filling is not None:
            filling.judged += 1
            filling.reward_launched[0] += total
            filling.reward_launched[1] += len(delivered)
        if not verdict.keep:
            if self._keeps_spares and verdict.category == "low_information":
                self._put_aside(open_group, group, verdict, now, out)
            else:
                self._drop(open_group, verdict, now, out)
            return
        self._kept += 1
        if filling is not None:
            filling.kept += 1
            filling.reward_kept[0] += total
            filling.reward_kept[1] += len(delivered)
        open_group.reason, open_group.source = verdict.reason, verdict.source
        open_group.evidence = dict(verdict.evidence)
        open_group.story.append((now, "committed", self.step))
        self.buffer.commit(group)
        self._go_on(now, out)

    @property
    def _keeps_spares(self) -> bool:
        return self.config.on_exhausted == "keep_low_information" and self.config.fill == "refill" and self._filling is not None

    def _put_aside(self, open_group: OpenGroup, group: Group, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """Dropped for low information, but held until the batch is full: it may be needed to top it up. The latest ones are held."""
        filling = self._filling
        assert filling is not None
        self.buffer.abort(open_group.group_id, verdict)
        open_group.story.append((now, f"dropped ({verdict.reason}), held in reserve", self.step))
        self._spare.append((open_group, group, verdict))
        if len(self._spare) > filling.wanted:
            oldest, _, its_verdict = self._spare.popleft()
            self._leave(oldest, "dropped", its_verdict, now, out)
        self._owe_replacement(open_group, verdict, out)
        self._go_on(now, out)

    def _drop(self, group: OpenGroup, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """The group leaves by verdict; by setting a group of the next round takes its place."""
        self.buffer.abort(group.group_id, verdict)
        group.story.append((now, f"dropped ({verdict.reason})", self.step))
        self._leave(group, "dropped", verdict, now, out)
        self._owe_replacement(group, verdict, out)
        self._go_on(now, out)

    def _owe_replacement(self, group: OpenGroup, verdict: Verdict, out: list[ev.Instruction]) -> None:
        filling = self._filling
        if filling is None:
            return
        key = (str(verdict.category), verdict.reason)
        filling.reasons[key] = filling.reasons.get(key, 0) + 1
        filling.dropped += 1
        if self.config.fill == "refill" and group.round < self.config.max_resample_rounds:
            filling.owed.append(group.round + 1)
        if not filling.kept and filling.dropped == NOTHING_KEPT_BATCHES * filling.wanted:
            message = (
                f"step {self.step}: {filling.dropped} groups were dropped for this batch and none has been kept so far. "
                f"{self._why(filling)} - {self._advice(filling, policy='go on')}"
            )
            out.append(ev.Warn(key="nothing_kept", message=message))

    def _abandon(self, group: OpenGroup, outcome: str, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A running group is stopped before it was judged; its task goes back to the source."""
        self.buffer.abort(group.group_id, verdict)
        group.story.append((now, f"abandoned ({verdict.reason})", self.step))
        out.append(ev.ReturnTask(task=group.task, epoch=group.epoch))
        self._tasks_ended = False
        self._leave(group, outcome, verdict, now, out)

    def _leave(self, group: OpenGroup, outcome: str, verdict: Verdict | None, now: float, out: list[ev.Instruction]) -> None:
        """Set the one outcome of a group, cancel what still runs for it, and write its record when the last attempt is settled."""
        group.outcome = outcome
        group.end_step = self.step
        if verdict is not None:
            group.reason, group.source = verdict.reason, verdict.source
            group.category = verdict.category if outcome == "dropped" else None
            group.evidence = dict(verdict.evidence)
        if group.running:
            out.extend([ev.CancelMember(attempt_id=attempt_id) for attempt_id in group.slots if attempt_id >= 0])
        open_members = len(group.delivered) - group.delivered.count(None)
        if open_members:
            self.ledger.members_left("discarded" if outcome == "cancelled" else outcome, open_members, group.open_tokens)
        self.ledger.group_left(outcome, group.category, group.reason)
        self._record_if_settled(group, now, out)

    def _record_if_settled(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        if group.running or group.outcome is None:
            return
        del self._groups[group.group_id]
        versions = [rollout.policy_version for rollout in group.delivered if rollout is not None]
        out.append(
            ev.RecordGroup(
                record=ev.GroupRecord(
                    group_id=group.group_id,
                    task_id=group.task.task_id,
                    domain=group.task.domain,
                    epoch=group.epoch,
                    round=group.round,
                    start_step=group.start_step,
                    end_step=group.end_step,
                    outcome=group.outcome,
                    reason=group.reason,
                    category=group.category,
                    source=group.source,
                    attempts=group.attempts,
                    sampled_tokens=group.tokens,
                    seconds=now - group.started_at,
                    policy_version=min(versions, default=-1),
                    rewards=group.rewards,
                    evidence=group.evidence,
                )
            )
        )

    # ------------------------------------------------------------ steps and the end

    def _step_advanced(self, event: ev.StepAdvanced, now: float, out: list[ev.Instruction]) -> None:
        if event.step <= self.step:
            raise SchedulerBug(f"StepAdvanced({event.step}): steps only go forward, the run is at {self.step}")
        for group in self._delivered:
            self._leave(group, "trained", None, now, out)
        self._delivered = []
        self.step = event.step
        self.ledger.trained_usefully(event.useful_groups, event.useful_tokens)

    def _shutdown(self, event: ev.Shutdown, now: float, out: list[ev.Instruction]) -> None:
        self._stopped = True
        if self._filling is not None:
            self._close_filling(self._filling)
        for open_group, _, verdict in self._spare:
            self._leave(open_group, "dropped", verdict, now, out)
        self._spare.clear()
        self._delivered = []
        self.buffer.take_all()
        for group in list(self._groups.values()):
            if group.outcome is not None:
                continue  # on its way out already
            if group.missing:
                self._abandon(group, "cancelled", SHUTDOWN, now, out)
            else:
                self._leave(group, "discarded", SHUTDOWN, now, out)

    # ------------------------------------------------------------ metrics

    def _batch_metrics(self, filling: _Filling, batch: Batch) -> dict[str, float]:
        out = {
            "scheduler/collect_query_count": float(len(batch.groups)),
            "scheduler/query_use_count": float(filling.launched),
            "scheduler/query_filter_count": float(filling.dropped),
            "scheduler/response_filter_count": float(sum(filling.members.values())),
            "scheduler/off_policy_ratio": sum([self.step - group.policy_version for group in batch.groups]) / max(1, len(batch.groups)),
            "scheduler/empty_batches": float(filling.empty_tries),
            "scheduler/topped_up_count": float(filling.topped_up),
            "scheduler/resample_rounds": float(max((g.round for g in batch.groups), default=0)),
        }
        if filling.judged:
            out["scheduler/acceptance_rate"] = filling.kept / filling.judged
        for name, (total, number) in (("launched", filling.reward_launched), ("kept", filling.reward_kept)):
            if number:
                out[f"reward/{name}_mean"] = total / number
        for (category, reason), count in filling.reasons.items():
            out[f"batch/rejected/{category}/{reason}"] = float(count)
        for reason, count in filling.members.items():
            out[f"batch/rejected_members/{reason}"] = float(count)
        return out


_DRAW: Final = ev.DrawTask()
