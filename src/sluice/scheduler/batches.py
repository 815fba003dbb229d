"""The part of the machine that fills batches: which groups are launched, when a batch is full, and what happens when it cannot be."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from sluice.errors import SchedulerBug
from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup
from sluice.scheduler.slots import Slot
from sluice.scheduler.tally import Tally
from sluice.types import Batch

if TYPE_CHECKING:
    pass
from sluice.scheduler.core import CANCELLED_BATCH_FULL, HELD_BY_GUARD, OVERFLOW
from sluice.scheduler.loop_groups import LoopGroups

EMPTY_BATCHES_IN_A_ROW: Final = 3  # batches of which nothing was kept, after which the run is an error whatever the policy
SMOOTHING: Final = 8.0  # judged groups that a perfect acceptance is worth before anything is measured: no over-launch on thin evidence


class Batches(LoopGroups):
    """From a wanted batch to a delivered one."""

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
        self._close_places()
        self._open_slots()
        self._go_on(now, out)
        self._arm(out)

    def _close_quota(self) -> None:
        """No batch is open: only what may be prepared ahead is needed."""
        self.buffer.close_batch(max(0, self.buffer.quota - (self.buffer.lookahead if self.config.is_async else 0)))

    def _close_places(self) -> None:
        """The batch is smaller by the places of it that were closed before it was asked for, as far as a batch can be."""
        assert self._wanted is not None
        before, self._closed = self._closed, []
        if before is None:
            end: float = self._window_end() if self.config.goes_by_ticket else math.inf
            before = sorted(place for place in self._closed_ahead if place.ticket < end)
            self._closed_ahead = [place for place in self._closed_ahead if place.ticket >= end]
        for place in before[: self._wanted - 1]:
            self._shrink_by(place)
            if place.is_by_guard:
                self._tally.shrunk += 1
            else:
                self._tally.closed += 1

    def _open_slots(self) -> None:
        """Owe a group of round 1 for every place of this batch, and of the lookahead, that has none and is not closed."""
        slots, wanted = self.slots, self._requested
        mine = self._closed or []
        closed = [*mine, *self._closed_ahead]
        total = wanted + self.buffer.lookahead
        if self._batches_left is not None:
            total = min(total, wanted * (1 + self._batches_left))
        end = slots.base + total
        if self.config.goes_by_ticket:
            taken = {group.slot.ticket for group in self._in_place()}
            taken.update(slot.ticket for slot in slots.waiting())
            taken.update(place.ticket for place in closed)
            first = max(slots.base, slots.next_ticket) if self.config.fill == "shrink" else slots.base
            slots.owed.extend([slots.give(ticket) for ticket in range(first, end) if ticket not in taken])
        elif slots.mix is not None and self.config.mix_on == "kept":
            self._needs = slots.mix.counts(slots.base, slots.base + wanted)
            have = self._by_domain()
            have.update(str(slot.domain) for slot in slots.waiting())
            have.update(place.domain for place in closed)
            self._needs -= Counter(place.domain for place in mine)
            for ticket in range(slots.base, end):
                domain = slots.mix.domain_of(ticket)
                if have[domain] > 0:
                    have[domain] -= 1
                else:
                    slots.owed.append(slots.give(ticket))
        else:
            missing = total - self.buffer.running - self.buffer.committed - slots.drawing - len(slots.owed) - len(closed)
            for _ in range(missing):
                slots.owed.append(slots.give(slots.next_ticket))
        limit = self.config.max_groups_per_batch
        if limit is not None:
            self._budget = limit + max(0, len(slots.owed) - wanted)  # what is prepared for later batches does not count

    def _by_domain(self) -> Counter[str]:
        """Running and committed groups of each domain."""
        return Counter(group.task.domain for group in self._in_place())

    def _in_place(self) -> list[OpenGroup]:
        """Groups that have a place in a batch: all that have not left, but those in reserve, which others replace."""
        spare = {group.group_id for group, _, _ in self._spare}
        return [group for group in self._groups.values() if group.outcome is None and group.group_id not in spare]

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
        self._stale_draws = max(0, self._stale_draws - 1)
        is_new = not self.prompts.is_drawn_again(task.task_id, event.epoch)
        if slot is None:
            self._return(task, event.epoch, out)  # its batch was filled meanwhile
            return
        if task.domain not in self.filters:
            raise SchedulerBug(f"task {task.task_id!r} has domain {task.domain!r}, known are {sorted(self.filters)}")
        if slot.domain is not None and task.domain != slot.domain:
            raise SchedulerBug(f"a task of domain {slot.domain!r} was to be drawn, got {task.task_id!r} of domain {task.domain!r}")
        self._tally.drawn += 1
        if task.task_id in self.prompts.quarantined:
            self._skip(slot, is_new, now, out)
            return
        if self._skipped:
            self._skipped.pop(slot.domain, None)
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
        if self.gate is not None:
            self.gate.launched(group)
        self._progress_at = now
        if self.config.group_timeout_s is not None:
            group.deadline = now + self.config.group_timeout_s
            self._deadlines[group_id] = group.deadline
            self._arm(out)
        if self.config.has_user_loop:
            group.has_loop = True
            out.append(ev.RunLoop(group_id=group_id, task=task, epoch=event.epoch, start_step=self.step, round=group.round))
            return
        for member_index in range(len(group.slots)):
            self._launch(group, member_index, now, out)

    def _skip(self, slot: Slot, is_new: bool, now: float, out: list[ev.Instruction]) -> None:
        """A prompt in quarantine was drawn: it is consumed, and another one is drawn in its stead."""
        self.prompts.skipped += 1
        self._skipped[slot.domain] += is_new  # what was put back says nothing about what is left
        # One permutation of the data may end with all of them and the next one begin with all of them.
        if self._skipped[slot.domain] <= 2 * len(self.prompts.quarantined):
            self.slots.draws.append(slot)
            out.append(_DRAW if slot.domain is None else ev.DrawTask(domain=slot.domain))
            return
        del self._skipped[slot.domain]
        self._is_quarantined_out = True
        self._source_ended(slot, now, out)

    def _quarantine_message(self) -> str:
        reasons = Counter(self.prompts.quarantined.values())
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        return (
            f"step {self.step}: expected prompts to sample, but all that are left ({len(self.prompts.quarantined)}) are in quarantine "
            f"because their groups were lost again and again ({told}). {self._tally.why(self._first_details)} - see why, or raise "
            "resampling.quarantine_after"
        )

    def _tasks_exhausted(self, event: ev.TasksExhausted, now: float, out: list[ev.Instruction]) -> None:
        slots = self.slots
        if not slots.draws:
            raise SchedulerBug("TasksExhausted without a DrawTask")
        slot = slots.draws.popleft()
        is_stale, self._stale_draws = self._stale_draws > 0, max(0, self._stale_draws - 1)
        if slot is None:
            return  # whoever asks next is told again
        self._is_quarantined_out = False
        self._source_ended(slot, now, out, is_stale=is_stale)

    def _source_ended(self, slot: Slot, now: float, out: list[ev.Instruction], *, is_stale: bool = False) -> None:
        """The source has nothing (usable) left for a slot: it stays owed, in case a prompt comes back; is_stale: one is on its way."""
        if self._budget is not None:
            self._budget += 1
        self.slots.owed.appendleft(slot)
        if self.prompts.later:
            self._return_later(out)
        elif slot.domain not in self._ended and not is_stale:
            self._ended.add(slot.domain)
            self._excused.add(slot.domain)
            if slot.domain is not None and not self._is_dry():
                left = "only prompts in quarantine left" if self._is_quarantined_out else "no prompts left"
                message = f"domain {slot.domain!r} has {left}: its share of the batches goes to the other domains"
                out.append(ev.Warn(key=f"ended/{slot.domain}", message=message))
        self._go_on(now, out)

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
        if not groups:
            self._closed = None
        self.slots.next_batch(self._requested)
        self._needs = Counter()
        self._close_quota()
        if self.config.is_async:
            self._trim_owed()
        else:
            self._end_synchronous_fill(now, out)
        self._return_later(out)
        is_last = (
            self._is_dry()
            and not self._is_quarantined_out
            and not self.buffer.running
            and not self.buffer.committed
            and not self.slots.drawing
        )
        batch = Batch(groups=tuple(taken), requested=self._requested, step=self.step, is_last=is_last)
        self._note_domains(batch, out)
        self._tally = Tally()
        out.append(ev.DeliverBatch(batch=batch, metrics=tally.metrics(batch, self.step, has_gate=self.gate is not None)))
        if self._prepares:
            self._draw(out)

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
            elif self._is_quarantined_out and not kept:
                self._fail(self._quarantine_message(), now, out)
            else:
                self._deliver(now, out)
            return
        policy = "shrink" if self.config.fill == "shrink" or tally.shrunk or tally.is_emptied else self.config.on_exhausted
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
        tally.closed, tally.is_emptied = 0, False
        self._closed = []
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
            self._wanted = self._closed = None
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


_DRAW: Final = ev.DrawTask()
