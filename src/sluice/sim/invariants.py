"""What must hold of the machine after every event, and at the end, from counts that nobody but the player and this room keeps.

`after_event` costs a few comparisons; every `FULL_EVERY` events everything is counted anew from the machine's own tables.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sized
from copy import copy
from fractions import Fraction
from typing import Any, Final, Protocol

from sluice.ledger import GROUP_OUTCOMES
from sluice.scheduler import GroupRecord, MachineGate, Scheduler
from sluice.sim.prompts import PromptBooks
from sluice.sim.scenario import Scenario
from sluice.sim.violation import Violation
from sluice.sim.world import make_tasks
from sluice.types import Batch, Group, Task

FULL_EVERY: Final = 256  # events between two full counts
EVENTS_OF_A_MEMBER: Final = 12  # at most, with its cancels, repeats and false ticks: what a bound on events is made of
MORE_EVENTS: Final = 10_000  # that no bound of the machine's own accounts for: draws in vain, ticks while somebody is slow


class Watched(Protocol):
    """What a player shows: what it knows by itself, and not from the machine."""

    @property
    def now(self) -> float:
        """Simulated seconds."""

    @property
    def engine_tokens(self) -> int:
        """That the engine has counted."""

    @property
    def untold(self) -> int:
        """Of these, the ones of which the machine has not been told; what it was told too early counts negative."""

    @property
    def unsettled(self) -> Sized:
        """Attempts of which the machine has not been told how they ended."""

    @property
    def leaving(self) -> int:
        """Of these, the ones whose cancel is on its way."""

    @property
    def loops(self) -> Sized:
        """User-defined loops under way."""

    @property
    def draws(self) -> int:
        """Tasks asked for and not answered."""

    @property
    def publishes(self) -> int:
        """New weights on their way to the engine."""

    @property
    def is_wanting(self) -> bool:
        """Whether a batch is waited for."""


class Invariants:
    """The books of one run. Told by the player what it drew, launched, recorded and delivered; copied with every checkpoint."""

    def __init__(self, machine: Scheduler, scenario: Scenario) -> None:
        self.scenario = scenario
        config = self._config = scenario.config
        self._needed_members = config.group_size if config.min_members is None else config.min_members
        self._places = config.group_size + config.redundancy
        is_restarted = config.on_weight_update == "restart"  # where no step bounds how often
        self._most_attempts = math.inf if is_restarted else self._places * config.max_response_rounds
        self._limit_of = {domain: config.domain_staleness.get(domain, config.staleness) for domain in scenario.domains}
        tasks = make_tasks(scenario.tasks, scenario.domains)
        self.prompts = PromptBooks(requeue=config.requeue, epochs=scenario.epochs, tasks=tasks)
        self.attempts = 0  # launched
        self.groups = 0  # launched
        self.recorded: set[int] = set()
        self.record_tokens = 0
        self.late_tokens = 0
        self.lost_tokens = 0
        self.late_results = 0
        self.digest = 0  # of all records and batches, in order
        self.batches = 0
        self.is_shut_down = False
        self._delivered: set[int] = set()  # groups of batches
        self._in_training: set[int] = set()  # of these, the ones that have not left
        self._is_last = False  # the last batch said that it is the last one
        # Of the batch that is asked for, or was asked for last:
        self._requested = 0
        self._largest_quota = 0
        self._restored = 0  # committed groups that a checkpoint brought back, until a batch is asked for
        self._asked = 0  # tasks asked for since the start
        self._asked_before = 0  # of these, before the batch was asked for
        self._has_round_ended = False  # a group left in the last round that is allowed
        self._ended: set[str | None] = set()  # domains (None: all) of which the source had nothing left when it was last asked
        self._has_data_ended = False  # of some domain
        # Shares of domains, until something makes them impossible:
        self._kept_of: Counter[str] = Counter()  # groups delivered
        self._asked_of: Counter[str] = Counter()  # draws
        self._is_mix_kept = config.domain_shares is not None and config.mix_on == "kept" and config.fill == "refill"
        self._is_mix_drawn = config.domain_shares is not None and config.mix_on == "drawn"
        # Rounds bound the groups of a batch, and so the events, where no machine goes on for ever.
        groups = scenario.batch * math.ceil(1 + config.async_generation_ratio) + config.max_additional_running_prompts
        members = self._places * config.max_response_rounds
        events = EVENTS_OF_A_MEMBER + (0 if scenario.gate is None else scenario.gate.steps)
        self._most_events = 3 * groups * config.max_resample_rounds * (members + 1) * events + MORE_EVENTS
        self._full_counts = 0  # since a batch was asked for or delivered
        self._watch(machine)

    def _watch(self, machine: Scheduler) -> None:
        self.machine = machine
        self.prompts.quarantined = machine.prompts.quarantined
        self._ledger = machine.ledger
        self._attempts_by_outcome, self._tokens_by_outcome = machine.ledger.attempts, machine.ledger.tokens
        self._buffer = machine.buffer
        self._running, self._open = machine._running, machine._groups  # the tables themselves: they are asked after every event
        self._in_progress, self._committed = machine.buffer._running, machine.buffer._committed
        self._until_full = FULL_EVERY

    def copy(self) -> Invariants:
        """The books as they stand, for a checkpoint."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, set | Counter):
                setattr(other, name, copy(value))
        other.prompts = self.prompts.copy()
        return other

    # ------------------------------------------------------------ what happened

    def wanted(self, groups: int) -> None:
        """A batch is asked for."""
        self._requested = groups
        self._full_counts = 0
        self._largest_quota = groups + math.ceil(self._config.async_generation_ratio * groups)
        self._restored = 0
        self._asked_before = self._asked
        self._has_round_ended = False
        self._has_data_ended = bool(self._ended)

    def failed(self, message: str) -> None:
        """The batch could not be filled: the cause that is told must have acted."""
        what = message.split("Groups dropped", maxsplit=1)[0]
        config, guard = self._config, self.scenario.guard
        policy = None if guard is None else guard.policy
        if "max_groups_per_batch" in what:
            has_acted = self._is_budget_spent()
        elif "max_resample_rounds" in what:
            has_acted = self._is_round_bound_reached()
        elif "in a row kept nothing" in what:
            gate = self.scenario.gate
            is_closed = gate is not None and gate.on_cut == "drop"
            has_acted = config.fill == "shrink" or policy == "shrink" or is_closed or self._has_bound_acted()
        elif "quarantine" in what:
            has_acted = self._are_prompts_in_quarantine
        else:
            has_acted = "guard.max_filter_ratio" in what and policy == "raise"
        if not has_acted:
            raise Violation(f"the batch was given up, and the cause that is told did not act: {message}")

    def asks(self, domain: str | None) -> None:
        """A task is asked for."""
        self._asked += 1
        if self._is_mix_drawn:
            self._asked_of[str(domain)] += 1
            if self._has_data_ended or self.machine.prompts.skipped:  # what has ended is drawn for by others, what is skipped again
                self._is_mix_drawn = False
            else:
                self._compare_shares(self._asked_of, "draws")

    def nothing_left(self, domain: str | None) -> None:
        """The source gave nothing."""
        self._ended.add(domain)
        self._has_data_ended = True

    def group_launched(self, group_id: int, task: Task) -> None:
        """A group, by its first attempt or its loop."""
        if group_id != self.groups:
            raise Violation(f"an attempt is launched for a group that is not open: {self.groups} groups were launched", [group_id])
        self.groups += 1
        self.prompts.launched(group_id, task)

    def put_back(self, task_id: str, epoch: int) -> None:
        """The machine put a prompt back."""
        self.prompts.put_back(task_id, epoch, self._outcome_of)
        self._ended.discard(None)
        self._ended.discard(task_id.split("/", maxsplit=1)[0])

    def _outcome_of(self, group_id: int) -> str | None:
        group = self.machine._groups.get(group_id)  # gone where its record comes next, which says why
        return None if group is None else group.outcome

    def record(self, record: GroupRecord, now: float) -> None:
        """A group left."""
        group_id, outcome, config = record.group_id, record.outcome, self._config
        if group_id in self.recorded or not 0 <= group_id < self.groups:
            raise Violation(f"group {group_id} is recorded a second time, or was never launched", [group_id])
        self.recorded.add(group_id)
        self.record_tokens += record.sampled_tokens
        if outcome not in GROUP_OUTCOMES or (record.category is not None) != (outcome in ("dropped", "cut")) or not record.reason:
            raise Violation(f"group {group_id} left as {outcome} with category {record.category}, reason {record.reason!r}", [group_id])
        if not 1 <= record.round <= config.max_resample_rounds or not 0 <= record.start_step <= record.end_step:
            where = f"in round {record.round} of {config.max_resample_rounds}, steps {record.start_step} to {record.end_step}"
            raise Violation(f"group {group_id} left {where}", [group_id])
        if record.attempts > self._most_attempts:
            raise Violation(f"group {group_id} had {record.attempts} attempts", [group_id])
        if (outcome == "trained") != (group_id in self._in_training) and not (outcome == "discarded" and self.is_shut_down):
            raise Violation(f"group {group_id} left as {outcome}, but batches held it: {group_id in self._delivered}", [group_id])
        if outcome == "cut":
            self._check_cut(record)
        self._in_training.discard(group_id)
        self.has_left(record)
        self.prompts.left(record)
        self.digest = hash((self.digest, group_id, record.round, record.attempts, record.sampled_tokens, record.end_step, now))

    def _check_cut(self, record: GroupRecord) -> None:
        """A cut is one that the rule makes, of a gate that may cut, and says what it was made on."""
        gate, evidence = self.scenario.gate, record.evidence
        is_of_gate = (record.category, record.reason, record.source) == ("low_information", "converged_prefix", "gate")
        if gate is None or gate.shadow or not is_of_gate or not evidence["margin"] < evidence["scale"]:
            raise Violation(f"group {record.group_id} is cut as {record.category}/{record.reason}: {dict(evidence)}", [record.group_id])
        if evidence["stopped_members"] < 1 or not 2 <= evidence["n"] <= self._config.group_size:
            raise Violation(f"group {record.group_id} is cut when it had ended, or too early: {dict(evidence)}", [record.group_id])

    def has_left(self, record: GroupRecord) -> None:
        """The same, perhaps before it is carried out: whether a bound acts."""
        if record.round == self._config.max_resample_rounds and record.outcome in ("dropped", "cut", "expired"):
            self._has_round_ended = True

    def stepped(self, step: int) -> None:
        """The trainer is at `step`."""
        if self.machine.step != step:
            raise Violation(f"the trainer is at step {step}, the machine at {self.machine.step}")
        open_still = [group_id for group_id in self._in_training if self._outcome_of(group_id) != "trained"]
        if open_still:
            raise Violation(f"groups {open_still} were trained, and have not left", open_still)

    # ------------------------------------------------------------ batches

    def batch(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """A batch is delivered."""
        self.batches += 1
        self._full_counts = 0
        ids = [group.group_id for group in batch.groups]
        if self.machine.filling is not None or batch.requested != self._requested or batch.step != self.machine.step:
            raise Violation(f"a batch of {batch.requested} groups for step {batch.step} comes where {self._requested} were asked for", ids)
        if len(set(ids)) < len(ids) or not self._delivered.isdisjoint(ids) or not self.recorded.isdisjoint(ids):
            raise Violation(f"the batch of step {batch.step} holds a group twice, or one that has left: {ids}", ids)
        order = [(group.start_step, group.group_id) for group in batch.groups]
        if order != sorted(order):
            raise Violation(f"the groups of the batch are not in the order of their launch: {ids}", ids)
        for group in batch.groups:
            self._check_group(group, batch.step)
        self._check_share(batch)
        self._check_size(batch, metrics)
        if self._is_mix_kept:
            self._check_mix(batch, metrics)
        if not all(map(math.isfinite, metrics.values())) or metrics["scheduler/collect_query_count"] != len(ids):
            raise Violation(f"the metrics of the batch are wrong: {dict(metrics)}", ids)
        self._delivered.update(ids)
        self._in_training.update(ids)
        self._is_last = batch.is_last
        self.digest = hash((self.digest, batch.step, *ids))

    def _check_group(self, group: Group, step: int) -> None:
        config, group_id, ids = self._config, group.group_id, [group.group_id]
        places = [rollout.member_index for rollout in group.rollouts]
        size = len(places)
        if places != sorted(set(places)) or not places or places[0] < 0 or places[-1] >= self._places or len(group.counted) != size:
            raise Violation(f"group {group_id} has the members {places}", ids)
        if not self._needed_members <= size <= config.group_size:
            raise Violation(f"group {group_id} has {size} members, expected {self._needed_members} to {config.group_size}", ids)
        if len({rollout.attempt_id for rollout in group.rollouts}) < size:
            raise Violation(f"group {group_id} holds an attempt twice", ids)
        has_signal = config.has_user_loop  # whose own verdict is final
        for rollout, is_counted in zip(group.rollouts, group.counted, strict=True):
            if rollout.group_id != group_id or rollout.task_id != group.task.task_id:
                raise Violation(f"group {group_id} holds a rollout of group {rollout.group_id}, task {rollout.task_id!r}", ids)
            has_signal = has_signal or (is_counted and rollout.reward is not None)
        if not has_signal:
            raise Violation(f"group {group_id} is trained without a member that counts", ids)
        prompt = self.prompts.of.get(group_id)
        if prompt != (group.task.task_id, group.epoch):
            raise Violation(f"group {group_id} is trained on {(group.task.task_id, group.epoch)}, drawn for it was {prompt}", ids)
        age, limit = step - min(group.start_step, group.policy_version), self._limit_of[group.task.domain]
        if not 0 <= age <= limit:
            since = f"launched in step {group.start_step} under version {group.policy_version}"
            raise Violation(f"group {group_id} is {age} steps old ({since}), allowed are {limit}", ids)

    def _check_share(self, batch: Batch) -> None:
        """For a fraction f of the ratio at most floor(f x batch) groups come from the oldest step, where no wider age is allowed."""
        config = self._config
        fraction, ahead = config.async_generation_ratio % 1.0, math.ceil(config.async_generation_ratio)
        if not fraction or config.staleness != ahead:
            return
        first = batch.step - ahead
        oldest = [group.group_id for group in batch.groups if group.start_step == first and self._limit_of[group.task.domain] == ahead]
        if len(oldest) > math.floor(fraction * batch.requested):
            raise Violation(f"{len(oldest)} groups of the batch come from the oldest step that the ratio permits", oldest)

    def _check_size(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """A batch is exact, or something that may make it short has really acted."""
        config, count, wanted = self._config, len(batch.groups), batch.requested
        ids = [group.group_id for group in batch.groups]
        if batch.is_last and (not self._has_data_ended or self.scenario.epochs is None):
            raise Violation("the batch says that it is the last one, but the data have not ended", ids)
        if count == wanted:
            return
        guard = self.scenario.guard
        shrunk = int(metrics.get("scheduler/shrunk_by_guard", 0.0)) if guard is not None and guard.policy == "shrink" else 0
        gate = self.scenario.gate
        shrunk += int(metrics["scheduler/closed_by_gate"]) if gate is not None and gate.on_cut == "drop" else 0
        may_be_short = config.fill == "shrink" or self._has_data_ended or self._are_prompts_in_quarantine or count >= wanted - shrunk
        if not may_be_short and (config.on_exhausted != "raise" or shrunk):
            may_be_short = self._has_bound_acted() or self._tops_up(batch, metrics)
        if count > wanted or not may_be_short or not (count or batch.is_last):
            raise Violation(f"the batch holds {count} groups where {wanted} were asked for, and nothing allows that", ids)

    @property
    def _are_prompts_in_quarantine(self) -> bool:
        """Whether all prompts, or where domains are asked for all of one domain, are in quarantine."""
        quarantined = self.machine.prompts.quarantined
        if not quarantined:
            return False
        tasks = make_tasks(self.scenario.tasks, self.scenario.domains)
        usable = {task.domain for task in tasks if task.task_id not in quarantined}
        return not usable or (self._config.domain_shares is not None and len(usable) < len(self.scenario.domains))

    def _tops_up(self, batch: Batch, metrics: Mapping[str, float]) -> bool:
        """Whether a group of the last round that is allowed was dropped, and yet tops the batch up."""
        last = self._config.max_resample_rounds
        return bool(metrics["scheduler/topped_up_count"]) and any(group.round == last for group in batch.groups)

    def _has_bound_acted(self) -> bool:
        return self._is_budget_spent() or self._is_round_bound_reached()

    def _is_budget_spent(self) -> bool:
        limit = self._config.max_groups_per_batch
        return limit is not None and self._asked - self._asked_before >= limit

    def _is_round_bound_reached(self) -> bool:
        machine, last = self.machine, self._config.max_resample_rounds
        return (
            self._has_round_ended
            or any(group.outcome is not None and group.round == last for group in machine._groups.values())  # not recorded yet
            or any(group.round == last for group, _, _ in machine._spare)
        )

    def _check_mix(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        self._kept_of.update([group.task.domain for group in batch.groups])
        is_short = len(batch.groups) < batch.requested or metrics["scheduler/topped_up_count"] or metrics.get("scheduler/shrunk_by_guard")
        if is_short or self._has_data_ended or self._are_prompts_in_quarantine or self._has_bound_acted():
            self._is_mix_kept = False
        else:
            self._compare_shares(self._kept_of, "trained groups")

    def _compare_shares(self, counts: Mapping[str, int], what: str) -> None:
        """Over any stretch from the start, each domain has its share within a group or two."""
        shares = self._config.domain_shares
        assert shares is not None
        total, whole = sum(counts.values()), sum(map(Fraction, shares.values()))
        for domain, share in shares.items():
            due = Fraction(share) / whole * total
            if abs(counts[domain] - due) >= 2:
                raise Violation(f"{counts[domain]} of {total} {what} are of domain {domain!r}, {float(due):.2f} were due")

    # ------------------------------------------------------------ after every event

    def after_event(self, player: Watched) -> None:
        """What can be compared in a moment."""
        ledger = self._ledger
        running = len(player.unsettled)
        if (
            len(self._running) != running
            or ledger.attempts_launched != self.attempts
            or self.attempts - sum(self._attempts_by_outcome.values()) - ledger.open_attempts != running
        ):
            raise Violation(
                f"{self.attempts} attempts were launched, of which {running} run; the machine knows of {len(self._running)}, the "
                f"ledger of {ledger.attempts_launched} and {ledger.running_attempts}"
            )
        if ledger.groups_launched != self.groups or len(self.recorded) + len(self._open) != self.groups:
            raise Violation(
                f"{self.groups} groups were launched and {len(self.recorded)} recorded; the ledger knows of {ledger.groups_launched}, and "
                f"{len(self._open)} are open"
            )
        if sum(self._tokens_by_outcome.values()) != player.engine_tokens - player.untold:
            raise Violation(
                f"the ledger accounts for {ledger.total_tokens} tokens, the engine sampled {player.engine_tokens}, of which "
                f"{player.untold} are not told yet"
            )
        buffer = self._buffer
        in_buffer = len(self._in_progress) + len(self._committed)
        if in_buffer > buffer.quota + self._config.max_additional_running_prompts and in_buffer > self._restored:
            raise Violation(f"{buffer.running} groups run and {buffer.committed} wait, the quota is {buffer.quota}")
        if buffer.quota > self._largest_quota:
            raise Violation(f"the quota is {buffer.quota}, at most {self._largest_quota} groups can be needed")
        if running == player.leaving and player.is_wanting and not player.draws and not len(player.loops):
            self._nothing_under_way(player)
        if machine_gate := self.machine.gate:
            self._look_at_gate(machine_gate)
        if self.prompts.due_back:
            due = self.prompts.due_back
            raise Violation(f"groups left without being judged, and their prompts were not put back: {due}", due.values())
        self._until_full -= 1
        if not self._until_full:
            self.full(player)

    def _look_at_gate(self, gate: MachineGate) -> None:
        """Members that wait for a decision wait for a sibling that is under way."""
        if gate.barrier:
            for group in self._open.values():
                if group.held and not group.closed and group.running - group.detached <= len(group.held):
                    raise Violation(f"all running members of group {group.group_id} wait for each other", [group.group_id])

    def _nothing_under_way(self, player: Watched) -> None:
        cause = self.machine.waiting_for(player.now)
        if self.machine.filling is None or cause in ("", "nothing"):
            raise Violation(f"a batch is wanted, nothing is under way, and the machine waits for {cause or 'no batch'}")
        if not player.publishes and not player.leaving:
            raise Violation(f"a batch is wanted, nothing is under way, and nothing that will come helps: the machine waits for {cause}")

    def full(self, player: Watched) -> None:
        """Count everything anew."""
        self._until_full = FULL_EVERY
        self._full_counts += 1
        if self._full_counts * FULL_EVERY > self._most_events:
            raise Violation(f"no batch has come of {self._full_counts * FULL_EVERY} events: this would go on for ever")
        machine, ledger = self.machine, self._ledger
        self.prompts.see_draws()
        groups = machine._groups.values()
        running, detached = sum([group.running for group in groups]), sum([group.detached for group in groups])
        in_place = sum([slot >= 0 for group in groups for slot in group.slots])
        if running != len(machine._running) or detached != len(machine._detached) or in_place + detached != running:
            raise Violation(f"the groups count {running} running attempts ({detached} let go, {in_place} in place), the machine otherwise")
        if detached != player.leaving:
            raise Violation(f"the machine waits for {detached} cancels, {player.leaving} are on their way")
        unjudged = sum([not group.closed for group in groups])
        if machine.buffer.running != unjudged + len(machine._held):
            raise Violation(f"{machine.buffer.running} groups run in the buffer, {unjudged} are open and {len(machine._held)} held")
        if min(*ledger.attempts.values(), *ledger.tokens.values(), *ledger.groups.values(), ledger.open_attempts) < 0:
            raise Violation("the ledger holds a negative count")
        on_their_way = sum([group.outcome is not None for group in groups])
        if sum(ledger.groups.values()) != len(self.recorded) + on_their_way:
            raise Violation(f"the ledger saw {sum(ledger.groups.values())} groups leave, {len(self.recorded)} + {on_their_way} did")
        late, lost = ledger.tokens["late"], ledger.tokens["lost"]
        if (late, lost, ledger.late_results) != (self.late_tokens, self.lost_tokens, self.late_results):
            raise Violation(
                f"{self.late_tokens} late tokens, {self.lost_tokens} lost tokens and {self.late_results} late results were told, the "
                f"ledger has {late}, {lost} and {ledger.late_results}"
            )
        of_open = sum([group.tokens for group in groups])
        if self.record_tokens + of_open + late + lost != ledger.total_tokens:
            raise Violation(
                f"records hold {self.record_tokens} tokens, open groups {of_open}, {late} came late and {lost} were lost: not the "
                f"{ledger.total_tokens} of the ledger"
            )
        if sum([group.open_tokens for group in groups if group.outcome is None]) != ledger.tokens["open"]:
            raise Violation("the tokens of open members are not those of the ledger")
        self._look_at_keepers(len(groups))
        json.dumps(machine.snapshot(player.now), allow_nan=False)  # plain data

    def _look_at_keepers(self, most: int) -> None:
        """Keepers remember no group that is not open."""
        gate = self.machine.gate
        for keeper in () if gate is None else (gate.groups, gate.members):
            watched = getattr(keeper, "watched", 0)
            if watched > most:
                raise Violation(f"a keeper of the gate watches {watched} groups, {most} are open")

    def fingerprint(self) -> tuple[Any, ...]:
        """Numbers that change with everything that the machine does."""
        machine = self.machine
        return (
            machine.running_attempts,
            machine.open_groups,
            machine.buffer.quota,
            machine.buffer.committed,
            machine.slots.next_ticket,
            machine.slots.drawing,
            machine.ledger.state_dict(),
        )

    # ------------------------------------------------------------ kill and resume

    def resumed(self, machine: Scheduler, saved: Mapping[str, Any], lost_tokens: int) -> None:
        """The books are those of a checkpoint, from whose state this machine goes on."""
        self._watch(machine)
        self.lost_tokens += lost_tokens
        self.prompts.see_draws()
        for task_id, epoch in saved["outstanding"]:
            self.put_back(task_id, epoch)
        waiting = {entry["group_id"] for entry in saved["committed"]}
        self._delivered -= waiting  # the step on them is not in the checkpoint
        self._in_training -= waiting
        self._restored = len(waiting)
        self._ended.clear()
        self._is_mix_kept = self._is_mix_drawn = False  # what was under way is forgotten, with its places in the mix
        self._is_last = False

    # ------------------------------------------------------------ at the end

    def end(self, player: Watched) -> None:
        """Everything is over."""
        self.full(player)
        machine, ledger = self.machine, self._ledger
        left_over = {
            "attempts": machine.running_attempts,
            "groups": machine.open_groups,
            "draws": len(machine.slots.draws) + player.draws,
            "running": machine.buffer.running,
            "committed": machine.buffer.committed,
            "held": len(machine._held),
            "later": len(machine.prompts.later),
            "loops": len(player.loops),
            "unsettled": len(player.unsettled),
            "untold": player.untold,
        }
        if any(left_over.values()):
            raise Violation(f"the run is over, but not everything has come back: {left_over}", machine._groups)
        if ledger.total_tokens != player.engine_tokens or ledger.tokens["open"] or ledger.open_attempts:
            raise Violation(f"the ledger accounts for {dict(ledger.tokens)}, the engine sampled {player.engine_tokens}")
        for whole in ("token", "attempt", "group"):
            shares = [value for key, value in machine.metrics().items() if key.startswith(f"ledger/{whole}_share/")]
            if shares and not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
                raise Violation(f"the shares of {whole}s sum to {sum(shares)}")
        self.prompts.end(have_data_ended=self._is_last)
