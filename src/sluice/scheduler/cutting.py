"""The part of the machine that acts on what its gate decides: a running group is cut, a trajectory is stopped, members wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup
from sluice.scheduler.judging import Judging
from sluice.scheduler.slots import ClosedPlace
from sluice.types import Verdict

PREFIX: Final = "gate/"  # of what the gate saw of a group and did not cut, in the evidence of its record


class Cutting(Judging):
    """From a step or an end of a member to what the gate makes of it. Only where there is a gate."""

    def _ask_gate(self, group: OpenGroup, event: ev.MemberStepped, now: float, out: list[ev.Instruction]) -> None:
        """A member took a step: decide on its group, then on itself."""
        gate = self.gate
        assert gate is not None
        place = group.slots.index(event.attempt_id)
        if group.task_type is None and event.task_type is not None:
            group.task_type = event.task_type
            gate.task_type_known(group)
        self._heed(group, gate.stepped(group, place, event), now, out)
        if group.closed:
            return
        if gate.is_futile(group, place, event):
            group.story.append((now, "stopped as futile", place))
            out.append(ev.StopMember(attempt_id=event.attempt_id))
        elif not event.is_last and gate.holds(group, place):
            group.held.append(event.attempt_id)
            out.append(ev.HoldMember(attempt_id=event.attempt_id))
        if group.held:
            self._release(group, out)

    def _ask_gate_again(self, group: OpenGroup, now: float, out: list[ev.Instruction]) -> None:
        """A member of a group ended, well or not: what was waited for may be there now."""
        gate = self.gate
        assert gate is not None
        if group.closed:
            return
        self._heed(group, gate.decision(group), now, out)
        if group.held and not group.closed:
            self._release(group, out)

    def _heed(self, group: OpenGroup, verdict: Verdict | None, now: float, out: list[ev.Instruction]) -> None:
        """Act on the gate's verdict on a group; None: there is none."""
        if verdict is None:
            return
        if verdict.keep:
            group.story.append((now, f"looked at by the gate ({verdict.reason})", self.step))
            group.gate_evidence = {f"{PREFIX}{name}": number for name, number in verdict.evidence.items()}
            return
        evidence = {**verdict.evidence, "stopped_members": float(group.running - group.detached)}
        if self.version is not None:
            evidence["policy_version"] = float(self.version)
        self._cut(group, replace(verdict, evidence=evidence), now, out)

    def _cut(self, group: OpenGroup, verdict: Verdict, now: float, out: list[ev.Instruction]) -> None:
        """A running group leaves by the gate's verdict, never to be judged; its prompt is spent. What its members earned is only kept."""
        assert self.gate is not None
        assert verdict.category is not None
        self.prompts.judged(group.task.task_id)
        self._judged += 1
        self._tally.group_judged(group.task.domain)
        self._tally.cut += 1
        self.buffer.abort(group.group_id, verdict)
        group.story.append((now, f"cut ({verdict.reason})", self.step))
        self._leave(group, "cut", verdict, now, out)
        if self.gate.on_cut == "replace" or self.config.fill == "shrink":
            self._owe_replacement(group, verdict, out)
        else:
            self._tally.group_dropped(verdict.category, verdict.reason)
            self._close_place(group)
        self._go_on(now, out)

    def _close_place(self, group: OpenGroup) -> None:
        """No group takes the place of this one: the batch that it was launched for is smaller by it, as far as a batch can be."""
        place = ClosedPlace(group.slot.ticket, group.task.domain)
        if self._wanted is None or (self.config.goes_by_ticket and group.slot.ticket >= self._window_end()):
            if self.config.is_async:
                self._closed_ahead.append(place)
        elif self._wanted > 1:
            self._shrink_by(place)
            if self._needs[group.task.domain] > 0:
                self._needs[group.task.domain] -= 1
            self._tally.closed += 1
        else:  # a batch of none is no batch
            self._tally.is_emptied = True

    def _release(self, group: OpenGroup, out: list[ev.Instruction]) -> None:
        """Members that wait for a decision that was made, or that will not be, go on."""
        gate = self.gate
        assert gate is not None
        held = [attempt_id for attempt_id in group.held if attempt_id in group.slots]  # the others have ended
        group.held = [attempt_id for attempt_id in held if gate.holds(group, group.slots.index(attempt_id))]
        out.extend([ev.ReleaseMember(attempt_id=attempt_id) for attempt_id in held if attempt_id not in group.held])
