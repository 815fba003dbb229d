"""The part of the machine that follows attempts: launch, settle, accept or reject, replace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sluice.errors import FilterError, SchedulerBug
from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup, scramble
from sluice.types import Failure, Rollout, Verdict

if TYPE_CHECKING:
    pass
from sluice.scheduler.cutting import Cutting


class Members(Cutting):
    """From an attempt to a member of a group, or to another attempt."""

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

    def _member_stepped(self, event: ev.MemberStepped, now: float, out: list[ev.Instruction]) -> None:
        group = self._running.get(event.attempt_id)
        if group is None:
            if not 0 <= event.attempt_id < self._next_attempt:
                raise SchedulerBug(f"attempt {event.attempt_id} stepped, but was never launched (the last one is {self._next_attempt - 1})")
            self.ledger.late_results += 1
            return
        group.env_steps += 1
        if self.gate is not None and event.attempt_id not in self._detached:
            self._ask_gate(group, event, now, out)

    def _member_ended(self, event: ev.MemberEnded, now: float, out: list[ev.Instruction]) -> None:
        group = self._running.get(event.attempt_id)
        if group is None:
            if not 0 <= event.attempt_id < self._next_attempt:
                raise SchedulerBug(f"attempt {event.attempt_id} ended, but was never launched (the last one is {self._next_attempt - 1})")
            return
        if self.gate is not None and event.attempt_id not in self._detached and not group.closed:
            self.gate.ended(group, group.slots.index(event.attempt_id))
            self._ask_gate_again(group, now, out)

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
            if self.gate is not None:
                warning = self.gate.delivered(group, index, rollout, is_counted=group.counted[index])
                if warning is not None:
                    out.append(ev.Warn(key=f"gate/{group.group_id}/{index}", message=warning))
                if rollout.finish_reason == "stopped_futile":
                    self.ledger.member_stopped(tokens)
            if group.has_loop:
                out.append(ev.MemberJudged(attempt_id=attempt_id, verdict=_MEMBER_KEPT))
            if self._disqualifying and group.missing and group.disqualified is None and not group.has_loop:
                query = self._disqualifying.get(group.task.domain)
                group.disqualified = None if query is None else query.disqualifies(rollout)
            if group.disqualified is not None and self._drops_early(group, now, out):
                return
            if not group.missing and not group.has_loop:
                self._judge(group, now, out)
            elif self.gate is not None:
                self._ask_gate_again(group, now, out)
            return
        self.ledger.attempt_ended("rejected", tokens, verdict.reason)
        group.rejections[index] += 1
        group.had_fault = group.had_fault or (rollout.failure is not None and rollout.failure.cause == "infrastructure")
        group.story.append((now, f"rejected ({verdict.reason})", index))
        if group.has_loop:
            out.append(ev.MemberJudged(attempt_id=attempt_id, verdict=verdict))
        self._tally.member_rejected(verdict.reason, rollout)
        if group.disqualified is None or not self._drops_early(group, now, out):
            self._replace(group, index, now, out)
            if self.gate is not None:
                self._ask_gate_again(group, now, out)

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
            if self.gate is not None:
                self._ask_gate_again(member[0], now, out)

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
        self.ledger.attempt_ended("cut" if group.outcome == "cut" else "cancelled", tokens)
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
        if self.gate is not None:
            for group in {member[0].group_id: member[0] for member in lost if member is not None}.values():
                self._ask_gate_again(group, now, out)

    def _replace(self, group: OpenGroup, member_index: int, now: float, out: list[ev.Instruction]) -> None:
        """A member did not deliver: others under way may be enough; else try again within the rounds; else it is lost."""
        if self.config.has_user_loop:
            return
        is_enough = group.running - group.detached >= group.missing
        place = -1 if is_enough else self._place_for(group, member_index)
        if self.gate is not None:
            self.gate.lost(group, member_index, is_replaced=place >= 0)
        if is_enough:
            return
        if place >= 0:
            self._launch(group, place, now, out)
            return
        rounds = self.config.max_response_rounds
        group.lost += 1
        group.missing -= 1
        size = self.config.group_size
        if size - group.lost < self._needed_members:
            evidence = {"rounds": float(rounds), "lost": float(group.lost)}
            verdict = Verdict.dropped("response_retries", "invalid", "scheduler", evidence)
            self._drop(group, verdict, now, out, is_lost=group.had_fault, is_failure=True)
        elif not group.missing:
            self._judge(group, now, out)

    def _place_for(self, group: OpenGroup, member_index: int) -> int:
        """Where a member that did not deliver is tried again: its own place, or a redundant one whose rounds are left; -1: nowhere."""
        rounds = self.config.max_response_rounds
        if group.tries[member_index] < rounds and group.slots[member_index] < 0:
            return member_index
        if self.config.redundancy:
            for place, tries in enumerate(group.tries):
                if tries < rounds and group.slots[place] < 0 and group.delivered[place] is None:
                    return place
        return -1


def _without_reward(rollout: Rollout) -> Rollout:
    """A rollout whose reward is no number: it has none."""
    failure = Failure(cause="infrastructure", reason="reward_missing", detail=f"its reward is {rollout.reward}")
    return replace(rollout, reward=None, failure=rollout.failure or failure)


_MEMBER_KEPT: Final = Verdict.kept("scheduler")
