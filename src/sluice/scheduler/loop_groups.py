"""The part of the machine that serves user-defined loops: attempts on request, and what a loop returns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sluice.errors import LoopError, SchedulerBug
from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup
from sluice.types import Rollout, Verdict

if TYPE_CHECKING:
    pass
from sluice.scheduler.judging import group_of
from sluice.scheduler.members import Members


class LoopGroups(Members):
    """Groups that a user-defined loop owns."""

    def _loop_attempt(self, event: ev.LoopAttempt, now: float, out: list[ev.Instruction]) -> None:
        group, index = self._groups.get(event.group_id), event.member_index
        if group is None or group.closed:
            out.append(ev.AttemptRefused(group_id=event.group_id, member_index=index, reason="group_closed"))
            return
        if not group.has_loop:
            raise SchedulerBug(f"LoopAttempt for a group that no loop owns\n{group.tell()}")
        if index == len(group.slots) and not self._add_place(group):
            out.append(ev.AttemptRefused(group_id=event.group_id, member_index=index, reason="response_retries"))
            return
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

    def _add_place(self, group: OpenGroup) -> bool:
        """A loop wants more responses to choose from than there are members: one more place, up to max_response_rounds whole groups."""
        config = self.config
        if len(group.slots) >= config.group_size * config.max_response_rounds + config.redundancy:
            return False
        group.delivered.append(None)
        group.counted.append(False)
        group.tries.append(0)
        group.rejections.append(0)
        group.slots.append(-1)
        return True

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
        self._tally.member_rejected(reason, rollout)

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
        group.missing = 0  # what was not returned is not waited for
        if event.judged is None:
            self._judge(group, now, out)
            return
        members = [index for index, rollout in enumerate(group.delivered) if rollout is not None]
        whole = group_of(group, tuple([returned[index] for index in members]), tuple([group.counted[index] for index in members]))
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
