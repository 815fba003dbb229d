"""The part of the machine that judges whole groups: filter, guard, commit or drop, and how every group leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sluice.errors import FilterError
from sluice.filters.guard import KEPT_BY_GUARD
from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup
from sluice.scheduler.slots import ClosedPlace
from sluice.scheduler.tally import Sums
from sluice.types import Group, Rollout, Verdict

if TYPE_CHECKING:
    pass
from sluice.scheduler.core import STALE, Core

NOTHING_KEPT_BATCHES: Final = 3  # so many times the batch dropped in a row without a keep: worth a warning before the bound acts


class Judging(Core):
    """From a whole group to its one outcome."""

    def _judge(self, open_group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        """Every member has delivered or is lost for good: commit or drop."""
        rollouts, counted = [], []
        for rollout, is_counted in zip(open_group.delivered, open_group.counted, strict=True):
            if rollout is not None:
                rollouts.append(rollout)
                counted.append(is_counted)
        group = group_of(open_group, tuple(rollouts), tuple(counted))
        if len({rollout.env_id for rollout in rollouts} - {None}) > 1:  # None: it does not say, or failed before it could
            self._decide(open_group, group, self._different_problems(open_group, group, out), now, out)
            return
        if self.gate is not None:
            earned = [rollout.reward for rollout, is_counted in zip(rollouts, counted, strict=True) if is_counted]
            self._tell_gate(open_group, [reward for reward in earned if reward is not None], out)
        try:
            verdict = self.filters[open_group.task.domain].query.judge(group)
        except Exception as error:
            raise FilterError(f"the filter of groups of domain {open_group.task.domain!r} failed: {error}\n{open_group.tell()}") from error
        self._decide(open_group, group, verdict, now, out)

    def _different_problems(self, open_group: OpenGroup, group: Group, out: list[ev.Instruction]) -> Verdict:
        """The environments of siblings gave them different problems: their rewards cannot be compared."""
        problems = sorted({rollout.env_id for rollout in group.rollouts if rollout.env_id is not None})
        key = (group.task.domain, "different_problems")
        if key not in self._first_details:
            self._first_details[key] = ", ".join(problems[:3])
            message = (
                f"expected one problem for all members of a group, got {len(problems)} ({', '.join(problems[:3])}): it is dropped as "
                "invalid - the same seed must give the same problem in every process (told once, counted from here on)"
            )
            out.append(ev.Warn(key="/".join(key), message=f"{message}\n{open_group.tell()}"))
        return Verdict.dropped("different_problems", "invalid", "scheduler", {"problems": float(len(problems))})

    def _tell_gate(self, group: OpenGroup, rewards: list[float] | None, out: list[ev.Instruction]) -> None:
        """A group ran to its end, with these rewards, or (None) left otherwise: what the gate learns of it."""
        assert self.gate is not None
        warning = self.gate.left(group, rewards)
        if warning is not None:
            out.append(ev.Warn(key=f"gate/{group.group_id}", message=warning))

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
        self._tally.guard_kept += verdict.keep and verdict.reason == KEPT_BY_GUARD  # by the guard of a filter
        guard, early = self.guard, open_group.disqualified
        if guard is not None:
            was_asked = open_group.guard_ticket is not None
            if open_group.guard_ticket is None:
                open_group.guard_ticket = guard.count()
            if early is not None and verdict.keep:  # where it was asked, it has kept the group then
                verdict = self._kept_by_guard(early) if was_asked else early
            if not verdict.keep:
                is_refused = was_asked and early is not None and (early.source, early.reason) == (verdict.source, verdict.reason)
                answer = self._guarded(open_group, group, verdict, now, out, is_refused=is_refused)
                if answer is None:
                    return
                verdict = answer
        elif early is not None:
            verdict = early
        if verdict.keep:
            self._commit(open_group, group, sums, verdict, now, out)
        elif self._keeps_spares and verdict.category == "low_information" and self._is_young(group):
            self._put_aside(open_group, group, verdict, now, out)
        else:
            self._drop(open_group, verdict, now, out)

    def _guarded(
        self, open_group: OpenGroup, group: Group, verdict: Verdict, now: float, out: list[ev.Instruction], *, is_refused: bool
    ) -> Verdict | None:
        """What the guard makes of a drop: the drop, a keep, or None when it has been acted on already.

        is_refused: it was asked about this drop when the first such member came, and is not asked again.
        """
        guard, ticket = self.guard, open_group.guard_ticket
        assert guard is not None
        assert ticket is not None
        assert verdict.category is not None
        is_trainable = any(
            is_counted and rollout.reward is not None for is_counted, rollout in zip(group.counted, group.rollouts, strict=True)
        )
        if not is_trainable or (not is_refused and guard.may_drop(verdict.category)):
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
                self._shrink_by(ClosedPlace(group.slot.ticket, group.task.domain, is_by_guard=True))
        if goes_on:
            if self._held:
                self._recheck_held(now, out)
            self._go_on(now, out)

    def _shrink_by(self, place: ClosedPlace) -> None:
        """The batch that is filled is smaller by this place."""
        assert self._wanted is not None
        assert self._closed is not None
        self._wanted -= 1
        self._closed.append(place)
        self.buffer.close_batch(1)

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
            group.category = verdict.category if outcome in ("dropped", "cut") else None
            group.evidence = dict(verdict.evidence)
        if not group.closed:
            self._close(group, out)
        if self.gate is not None:
            self._tell_gate(group, None, out)
        open_members = len(group.delivered) - group.delivered.count(None)
        if open_members:
            self.ledger.members_left("discarded" if outcome == "cancelled" else outcome, open_members, group.open_tokens)
        self.ledger.group_left(outcome, group.category, group.reason)
        self._record_if_settled(group, now, out)

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

    def _let_go(self, group: OpenGroup, member_index: int, out: list[ev.Instruction]) -> None:
        """Cancel one attempt; whatever still comes of it is only counted."""
        attempt_id = group.slots[member_index]
        group.slots[member_index] = -1
        group.detached += 1
        self._detached.add(attempt_id)
        out.append(ev.CancelMember(attempt_id=attempt_id))

    def _record_if_settled(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        if group.running or group.outcome is None:
            return
        del self._groups[group.group_id]
        self.ledger.group_settled(group.tokens, group.env_steps)
        delivered = zip(group.delivered, group.counted, strict=True)
        members = tuple([(one, counted and one.reward is not None) for one, counted in delivered if one is not None])
        out.append(ev.RecordGroup(record=group.record(now), members=members, is_whole=not group.missing))

    def _release_spares(self, now: float, out: list[ev.Instruction]) -> None:
        """No batch will be topped up with them."""
        for group, _, verdict in self._spare:
            self._leave(group, "dropped", verdict, now, out)
        self._spare.clear()


def group_of(open_group: OpenGroup, rollouts: tuple[Rollout, ...], counted: tuple[bool, ...]) -> Group:
    return Group(
        group_id=open_group.group_id,
        task=open_group.task,
        rollouts=rollouts,
        start_step=open_group.start_step,
        round=open_group.round,
        epoch=open_group.epoch,
        counted=counted,
    )
