"""What must hold of the machine after every event, and at the end, from counts that nobody but the player and this file keeps.

`after_event` costs a few comparisons; every `FULL_EVERY` events everything is counted anew from the machine's own tables.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from copy import copy
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from sluice.ledger import GROUP_OUTCOMES
from sluice.scheduler import GroupRecord, Scheduler
from sluice.scheduler import events as ev
from sluice.sim.scenario import Scenario
from sluice.sim.world import make_tasks
from sluice.types import Batch, Group, Task

if TYPE_CHECKING:
    from sluice.sim.player import Player

FULL_EVERY: Final = 256  # events between two full counts
MOST_EVENTS: Final = 100_000  # of one run; the longest takes a quarter
LOST_REASONS: Final = frozenset({"group_timeout", "response_retries"})
"""Reasons of groups that were dropped without being judged, as are those that a loop gives up: their prompts may come back."""

Prompt = tuple[str, int]
"""task_id and epoch."""


class Violation(Exception):
    """Something that must hold does not. groups: those it is about."""

    def __init__(self, message: str, groups: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.groups = tuple(groups)


class Invariants:
    """The books of one run. Told by the player what it drew, launched, recorded and delivered; copied with every checkpoint."""

    def __init__(self, machine: Scheduler, scenario: Scenario) -> None:
        self.scenario = scenario
        config = scenario.config
        self._config = config
        self._needed_members = config.group_size if config.min_members is None else config.min_members
        self._places = config.group_size + config.redundancy
        is_restarted = config.on_weight_update == "restart"  # where no step bounds how often
        self._most_attempts = math.inf if is_restarted else self._places * config.max_response_rounds
        self.attempts = 0  # launched
        self.groups = 0  # launched
        self.recorded: set[int] = set()
        self.record_tokens = 0
        self.late_tokens = 0
        self.lost_tokens = 0
        self.late_results = 0
        self.digest = 0  # of all records and batches, in order
        self.batches = 0
        self.delivered: set[int] = set()  # groups of batches
        self._requested = 0
        self.asked = 0  # tasks asked for
        self._asked_before = 0  # of these, before the batch was asked for
        self._bound_acted = False  # a replacement was due that max_resample_rounds did not allow, since the batch was asked for
        self._in_training: set[int] = set()
        self._largest_quota = 0
        self._restored = 0  # committed groups that a checkpoint brought back, until a batch is asked for
        self._out: dict[Prompt, int] = {}  # prompts in use -> their group; -1: none yet
        self.prompt_of: dict[int, Prompt] = {}  # groups without a record
        self._given_back: dict[int, str | None] = {}  # of these, the ones whose prompt the machine has put back -> outcome, if known
        self._drawing: deque[Prompt] = deque()  # were drawn, and no group is known for them yet
        self._due_back: dict[Prompt, int] = {}  # prompts of groups that left unjudged: before anything else happens they are put back
        self._lost: dict[Prompt, int] = {}  # prompts of groups that were lost, until they are put back -> that group
        self._came_back: set[Prompt] = set()  # put back because its group was lost or expired
        self._times_drawn: Counter[Prompt] = Counter()
        self._times_back: Counter[Prompt] = Counter()
        self._ended: set[str | None] = set()  # domains (None: all) of which the source had nothing left when it was last asked
        self._data_ended = False  # of some domain, since the batch was asked for
        self._shares_broken = False
        self._asked_of: Counter[str] = Counter()  # draws by domain
        self._are_draws_off = False
        self._by_domain: Counter[str] = Counter()  # groups delivered
        self.warnings: Counter[str] = Counter()
        self.fail: str | None = None
        self.is_shut_down = False
        self.is_last = False
        self._watch(machine)

    def _watch(self, machine: Scheduler) -> None:
        self.machine = machine
        self._ledger = machine.ledger
        self._attempts_by_outcome, self._tokens_by_outcome = machine.ledger.attempts, machine.ledger.tokens
        self._buffer = machine.buffer
        self._running, self._open = machine._running, machine._groups  # the tables themselves: they are asked after every event
        self._in_progress, self._committed = machine.buffer._running, machine.buffer._committed
        self._limit_of = {domain: self._config.domain_staleness.get(domain, self._config.staleness) for domain in self.scenario.domains}
        self._until_full = FULL_EVERY

    def copy(self) -> Invariants:
        """The books as they stand, for a checkpoint."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, set | dict | deque):  # counters too
                setattr(other, name, copy(value))
        return other

    # ------------------------------------------------------------ what happened

    def wanted(self, groups: int) -> None:
        """A batch is asked for."""
        self._requested = groups
        self._largest_quota = groups + math.ceil(self._config.async_generation_ratio * groups)
        self._restored = 0
        self._asked_before = self.asked
        self._bound_acted = False
        self._data_ended = bool(self._ended)
        self.fail = None

    def failed(self, message: str) -> None:
        """The batch could not be filled; the cause that is told has really acted."""
        self.fail = message
        config, guard = self._config, self.scenario.guard
        if "max_groups_per_batch" in message.split(". ")[0]:
            is_true = config.max_groups_per_batch is not None and self.asked - self._asked_before >= config.max_groups_per_batch
        elif "max_resample_rounds" in message.split(". ")[0]:
            is_true = self._has_round_ended()
        elif "in a row kept nothing" in message:
            is_true = config.fill == "shrink" or self._has_bound_acted() or (guard is not None and guard.policy == "shrink")
        elif "quarantine" in message:
            is_true = self.machine.prompts.skipped > 0
        else:
            is_true = "guard.max_filter_ratio" in message and guard is not None and guard.policy == "raise"
        if not is_true:
            raise Violation(f"the batch was given up, and the cause that is told did not act: {message}")

    def warned(self, key: str) -> None:
        """The machine said something."""
        self.warnings[key.split("/")[0]] += 1

    def drawn(self, drawn: tuple[Task, int]) -> None:
        """The source gave a task of an epoch, of which the machine is told next."""
        prompt = drawn[0].task_id, drawn[1]
        if prompt in self._out:
            raise Violation(f"the source gave prompt {prompt} while it was in use", [self._out[prompt]])
        self._out[prompt] = -1
        self._drawing.append(prompt)
        if self.scenario.epochs is not None:
            self._times_drawn[prompt] += 1

    def _see_draws(self, task_id: str | None = None) -> None:
        """Prompts drawn before this task (None: all) were neither launched nor put back: then they are in quarantine, and consumed."""
        drawing = self._drawing
        while drawing and drawing[0][0] != task_id:
            prompt = drawing.popleft()
            if prompt[0] not in self.machine.prompts.quarantined:
                raise Violation(f"prompt {prompt} was drawn, and no group was launched for it")
            del self._out[prompt]

    def asks(self, domain: str | None) -> None:
        """A task is asked for."""
        self.asked += 1
        config = self._config
        if config.mix_on == "drawn" and config.domain_shares is not None and not self._are_draws_off:
            self._asked_of[str(domain)] += 1
            if self._data_ended or self.machine.prompts.skipped:  # what has ended or is in quarantine is drawn for by others, or again
                self._are_draws_off = True
            else:
                self._compare_shares(self._asked_of, config.domain_shares, "draws")

    def nothing_left(self, domain: str | None) -> None:
        """The source gave nothing."""
        self._ended.add(domain)
        self._data_ended = True

    def group_launched(self, group_id: int, task: Task) -> None:
        """A group, by its first attempt or its loop."""
        if group_id != self.groups:
            raise Violation(f"an attempt is launched for a group that is not open: {self.groups} groups were launched", [group_id])
        drawing = self._drawing
        if not drawing or drawing[0][0] != task.task_id:
            self._see_draws(task.task_id)
            if not drawing:
                raise Violation(f"a group is launched for task {task.task_id!r}, which was not drawn for it", [group_id])
        prompt = drawing.popleft()
        self.groups += 1
        self.prompt_of[group_id] = prompt
        self._out[prompt] = group_id

    def returned(self, task_id: str, epoch: int) -> None:
        """The machine put a prompt back."""
        prompt = task_id, epoch
        group_id = self._out.pop(prompt, None)
        self._due_back.pop(prompt, None)
        if group_id is None:
            lost = self._lost.pop(prompt, None)
            if lost is None:
                raise Violation(f"prompt {prompt} is put back, but it is not in use")
            self._comes_back(prompt, lost)
        elif group_id in self.prompt_of:
            group = self.machine._groups.get(group_id)  # None: its record comes next, and says why
            why = None if group is None else group.outcome
            self._given_back[group_id] = why
            if why is not None and why != "cancelled":
                self._comes_back(prompt, group_id)
        elif group_id >= 0:  # its record was faster
            pass
        else:
            self._drawing.remove(prompt)
        if self.scenario.epochs is not None:
            self._times_back[prompt] += 1
        self._ended.discard(None)
        self._ended.discard(task_id.split("/")[0])

    def _comes_back(self, prompt: Prompt, group_id: int) -> None:
        if prompt in self._came_back or not self._config.requeue:
            raise Violation(
                f"prompt {prompt} comes back because its group was lost or expired; requeue is {self._config.requeue}", [group_id]
            )
        self._came_back.add(prompt)

    def record(self, record: GroupRecord, now: float) -> None:
        """A group left."""
        group_id, outcome, config = record.group_id, record.outcome, self._config
        if group_id in self.recorded or not 0 <= group_id < self.groups:
            raise Violation(f"group {group_id} is recorded a second time, or was never launched", [group_id])
        self.recorded.add(group_id)
        self.record_tokens += record.sampled_tokens
        if outcome not in GROUP_OUTCOMES or (record.category is not None) != (outcome == "dropped") or not record.reason:
            raise Violation(f"group {group_id} left as {outcome} with category {record.category}, reason {record.reason!r}", [group_id])
        if not 1 <= record.round <= config.max_resample_rounds or not 0 <= record.start_step <= record.end_step:
            raise Violation(
                f"group {group_id} left in round {record.round} of {config.max_resample_rounds}, steps {record.start_step} to "
                f"{record.end_step}",
                [group_id],
            )
        if record.attempts > self._most_attempts:
            raise Violation(f"group {group_id} had {record.attempts} attempts", [group_id])
        if (outcome == "trained") != (group_id in self._in_training) and not (outcome == "discarded" and self.is_shut_down):
            raise Violation(f"group {group_id} left as {outcome}, but batches held it: {group_id in self.delivered}", [group_id])
        self._in_training.discard(group_id)
        self.has_left(record)
        self._settle_prompt(record)
        self.digest = hash((self.digest, group_id, record.round, record.attempts, record.sampled_tokens, record.end_step, now))

    def has_left(self, record: GroupRecord) -> None:
        """The same, perhaps before it is carried out: whether a bound acts."""
        if record.round == self._config.max_resample_rounds and record.outcome in ("dropped", "expired"):
            self._bound_acted = True

    def _settle_prompt(self, record: GroupRecord) -> None:
        """The prompt of a group that has left is spent, or was put back because nothing had judged it."""
        group_id, outcome = record.group_id, record.outcome
        prompt = self.prompt_of.pop(group_id)
        was_lost = record.category == "invalid" and (record.reason in LOST_REASONS or record.source == "loop")
        was_unused = outcome == "expired" or (outcome == "surplus" and record.reason == "domain_full")
        if group_id in self._given_back:
            if self._given_back.pop(group_id) is None and outcome != "cancelled":
                self._comes_back(prompt, group_id)
            if not was_lost and not was_unused and outcome != "cancelled":
                raise Violation(f"group {group_id} was {outcome} ({record.reason}), and yet its prompt {prompt} was put back", [group_id])
            return
        if was_unused and self._config.requeue and prompt not in self._came_back:
            self._came_back.add(prompt)
            self._due_back[prompt] = group_id
            return
        if outcome == "cancelled":
            self._due_back[prompt] = group_id
            return
        del self._out[prompt]
        if was_lost:  # it may still come back, when the batch has been delivered
            self._lost[prompt] = group_id

    def stepped(self, step: int) -> None:
        """The trainer is at `step`."""
        if self.machine.step != step:
            raise Violation(f"the trainer is at step {step}, the machine at {self.machine.step}")
        open_still = [group_id for group_id in self._in_training if not self._is_waiting_for_acks(group_id)]
        if open_still:
            raise Violation(f"groups {open_still} were trained, and have not left", open_still)

    def _is_waiting_for_acks(self, group_id: int) -> bool:
        group = self.machine._groups.get(group_id)
        return group is not None and group.outcome == "trained" and group.running > 0

    # ------------------------------------------------------------ batches

    def batch(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """A batch is delivered."""
        self.batches += 1
        ids = [group.group_id for group in batch.groups]
        if self.machine.filling is not None or batch.requested != self._requested or batch.step != self.machine.step:
            raise Violation(f"a batch of {batch.requested} groups for step {batch.step} comes where {self._requested} were asked for", ids)
        if len(set(ids)) < len(ids) or not self.delivered.isdisjoint(ids) or not self.recorded.isdisjoint(ids):
            raise Violation(f"the batch of step {batch.step} holds a group twice, or one that has left: {ids}", ids)
        if [(group.start_step, group.group_id) for group in batch.groups] != sorted(
            (group.start_step, group.group_id) for group in batch.groups
        ):
            raise Violation(f"the groups of the batch are not in the order of their launch: {ids}", ids)
        for group in batch.groups:
            self._check_group(group, batch.step)
        self._check_share(batch)
        self._check_size(batch, metrics)
        self._check_mix(batch, metrics)
        if not all(math.isfinite(value) for value in metrics.values()) or metrics["scheduler/collect_query_count"] != len(ids):
            raise Violation(f"the metrics of the batch are wrong: {dict(metrics)}", ids)
        self.delivered.update(ids)
        self._in_training.update(ids)
        self.is_last = batch.is_last
        self.digest = hash((self.digest, batch.step, *ids))

    def _check_group(self, group: Group, step: int) -> None:
        ids, group_id = [group.group_id], group.group_id
        places = [rollout.member_index for rollout in group.rollouts]
        size = len(places)
        if places != sorted(set(places)) or not places or places[0] < 0 or places[-1] >= self._places or len(group.counted) != size:
            raise Violation(f"group {group_id} has the members {places}", ids)
        if not self._needed_members <= size <= self._config.group_size:
            raise Violation(f"group {group_id} has {size} members, expected {self._needed_members} to {self._config.group_size}", ids)
        if len({rollout.attempt_id for rollout in group.rollouts}) < size:
            raise Violation(f"group {group_id} holds an attempt twice", ids)
        for rollout in group.rollouts:
            if rollout.group_id != group_id or rollout.task_id != group.task.task_id:
                raise Violation(f"group {group_id} holds a rollout of group {rollout.group_id}, task {rollout.task_id!r}", ids)
        if not any(counted and rollout.reward is not None for counted, rollout in zip(group.counted, group.rollouts, strict=True)):
            if not self._config.has_user_loop:  # whose verdict is final
                raise Violation(f"group {group_id} is trained without a member that counts", ids)
        prompt = group.task.task_id, group.epoch
        if self.prompt_of.get(group_id) != prompt or group_id in self._given_back:
            raise Violation(f"group {group_id} is trained on the prompt {prompt}, drawn for it was {self.prompt_of.get(group_id)}", ids)
        age = step - min(group.start_step, group.policy_version)
        if not 0 <= age <= self._limit_of[group.task.domain]:
            raise Violation(
                f"group {group_id} is {age} steps old (launched in step {group.start_step} under version {group.policy_version}), "
                f"allowed are {self._limit_of[group.task.domain]}",
                ids,
            )

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
        if batch.is_last and (not self._data_ended or self.scenario.epochs is None):
            raise Violation("the batch says that it is the last one, but the data have not ended", ids)
        if count == wanted:
            return
        guard = self.scenario.guard
        shrunk = int(metrics.get("scheduler/shrunk_by_guard", 0.0)) if guard is not None and guard.policy == "shrink" else 0
        may_be_short = (
            config.fill == "shrink"
            or self._data_ended
            or count >= wanted - shrunk
            or ((config.on_exhausted != "raise" or shrunk) and (self._has_bound_acted() or self._tops_up(batch, metrics)))
        )
        if count > wanted or not may_be_short or not (count or batch.is_last):
            raise Violation(f"the batch holds {count} groups where {wanted} were asked for, and nothing allows that", ids)

    def _tops_up(self, batch: Batch, metrics: Mapping[str, float]) -> bool:
        """Whether a group of the last round that is allowed was dropped, and yet tops the batch up."""
        last = self._config.max_resample_rounds
        return bool(metrics["scheduler/topped_up_count"]) and any(group.round == last for group in batch.groups)

    def _has_bound_acted(self) -> bool:
        """Whether no more groups may be launched for the batch, or some group has left in the last round that is allowed."""
        limit = self._config.max_groups_per_batch
        return (limit is not None and self.asked - self._asked_before >= limit) or self._has_round_ended()

    def _has_round_ended(self) -> bool:
        last = self._config.max_resample_rounds
        return (
            self._bound_acted
            or any(group.outcome is not None and group.round == last for group in self.machine._groups.values())  # not recorded yet
            or any(group.round == last for group, _, _ in self.machine._spare)
        )

    def _check_mix(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Where kept groups are mixed, the shares hold over all batches within a group or two, until something makes them impossible."""
        config, shares = self._config, self._config.domain_shares
        if shares is None or config.mix_on != "kept" or config.fill == "shrink":
            return
        self._by_domain.update([group.task.domain for group in batch.groups])
        if len(batch.groups) < batch.requested or self._data_ended or metrics["scheduler/topped_up_count"] or self._has_bound_acted():
            self._shares_broken = True
        if self._shares_broken:
            return
        self._compare_shares(self._by_domain, shares, "groups trained")

    def _compare_shares(self, counts: Mapping[str, int], shares: Mapping[str, float], what: str) -> None:
        total, whole = sum(counts.values()), sum(map(Fraction, shares.values()))
        for domain, share in shares.items():
            due = Fraction(share) / whole * total
            if abs(counts[domain] - due) >= 2:
                raise Violation(f"{counts[domain]} of {total} {what} are of domain {domain!r}, {float(due):.2f} were due")

    # ------------------------------------------------------------ after every event

    def after_event(self, player: Player) -> None:
        """What can be compared in a moment."""
        machine, ledger = self.machine, self._ledger
        running = len(player.unsettled)
        if (
            len(self._running) != running
            or ledger.attempts_launched != self.attempts
            or self.attempts - sum(self._attempts_by_outcome.values()) - ledger.open_attempts != running
        ):
            raise Violation(
                f"{self.attempts} attempts were launched, of which {running} run; the machine knows of {machine.running_attempts}, the "
                f"ledger of {ledger.attempts_launched} and {ledger.running_attempts}"
            )
        if ledger.groups_launched != self.groups or len(self.recorded) + len(self._open) != self.groups:
            raise Violation(
                f"{self.groups} groups were launched and {len(self.recorded)} recorded; the ledger knows of {ledger.groups_launched}, and "
                f"{machine.open_groups} are open"
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
        if running == player.leaving and player.is_wanting and not player.draws and not player.loops:
            self._nothing_under_way(player)
        if self._due_back:
            raise Violation(
                f"groups left without being judged, and their prompts were not put back: {self._due_back}", self._due_back.values()
            )
        self._until_full -= 1
        if not self._until_full:
            self.full(player)

    def _nothing_under_way(self, player: Player) -> None:
        machine = self.machine
        cause = machine.waiting_for(player.now)
        if machine.filling is None or cause in ("", "nothing"):
            raise Violation(f"a batch is wanted, nothing is under way, and the machine waits for {cause or 'no batch'}")
        if not player.publishes and not player.leaving:
            raise Violation(f"a batch is wanted, nothing is under way, and nothing that will come helps: the machine waits for {cause}")

    def full(self, player: Player) -> None:
        """Count everything anew."""
        self._until_full = FULL_EVERY
        if player.events > MOST_EVENTS:
            raise Violation(f"the run has not ended after {player.events} events: it would go on for ever")
        machine, ledger = self.machine, self._ledger
        self._see_draws()
        groups = machine._groups
        running = sum(group.running for group in groups.values())
        detached = sum(group.detached for group in groups.values())
        places = sum(slot >= 0 for group in groups.values() for slot in group.slots)
        if running != len(machine._running) or detached != len(machine._detached) or places + detached != running:
            raise Violation(f"the groups count {running} running attempts ({detached} let go, {places} in place), the machine otherwise")
        if detached != player.leaving:
            raise Violation(f"the machine waits for {detached} cancels, {player.leaving} are on their way")
        unjudged = [group for group in groups.values() if not group.closed]
        if machine.buffer.running != len(unjudged) + len(machine._held):
            raise Violation(f"{machine.buffer.running} groups run in the buffer, {len(unjudged)} are open and {len(machine._held)} held")
        if min(*ledger.attempts.values(), *ledger.tokens.values(), *ledger.groups.values(), ledger.open_attempts) < 0:
            raise Violation("the ledger holds a negative count")
        left = [group for group in groups.values() if group.outcome is not None]
        if sum(ledger.groups.values()) != len(self.recorded) + len(left):
            raise Violation(f"the ledger saw {sum(ledger.groups.values())} groups leave, {len(self.recorded)} + {len(left)} did")
        open_tokens = sum(group.tokens for group in groups.values())
        late, lost = ledger.tokens["late"], ledger.tokens["lost"]
        if late != self.late_tokens or lost != self.lost_tokens or ledger.late_results != self.late_results:
            raise Violation(
                f"late tokens {self.late_tokens}, lost tokens {self.lost_tokens}, late results {self.late_results}; the ledger has {late}, "
                f"{lost}, {ledger.late_results}"
            )
        if self.record_tokens + open_tokens + late + lost != ledger.total_tokens:
            raise Violation(
                f"records hold {self.record_tokens} tokens, open groups {open_tokens}, {late} came late and {lost} were lost: not the "
                f"{ledger.total_tokens} of the ledger"
            )
        if sum(group.open_tokens for group in groups.values() if group.outcome is None) != ledger.tokens["open"]:
            raise Violation("the tokens of open members are not those of the ledger")
        json.dumps(machine.snapshot(player.now), allow_nan=False)

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
            repr(machine.ledger.state_dict()),
        )

    # ------------------------------------------------------------ kill and resume

    def resumed(self, machine: Scheduler, saved: Mapping[str, Any], lost_tokens: int) -> None:
        """The books are those of a checkpoint, from whose state this machine goes on."""
        self._watch(machine)
        self.lost_tokens += lost_tokens
        self._see_draws()
        for task_id, epoch in saved["outstanding"]:
            self.returned(task_id, epoch)
        waiting = {entry["group_id"] for entry in saved["committed"]}
        self.delivered -= waiting  # the step on them is not in the checkpoint
        self._in_training -= waiting
        self._restored = len(waiting)
        self._ended.clear()
        self._shares_broken = True  # what was launched for the batch in progress is forgotten, with its places in the mix
        self.is_last = False

    # ------------------------------------------------------------ at the end

    def end(self, player: Player) -> None:
        """Everything is over."""
        self.full(player)
        machine, ledger = self.machine, self._ledger
        snapshot = machine.snapshot(player.now)
        if (
            machine.running_attempts
            or machine.open_groups
            or machine.slots.draws
            or machine.buffer.running
            or machine.buffer.committed
            or machine.prompts.later
            or player.loops
            or player.unsettled
            or player.untold
            or player.draws
            or snapshot["held_by_guard"]
        ):
            raise Violation(f"the run is over, but not everything has come back: {snapshot}", machine._groups)
        if ledger.total_tokens != player.engine_tokens or ledger.tokens["open"] or ledger.open_attempts:
            raise Violation(f"the ledger accounts for {dict(ledger.tokens)}, the engine sampled {player.engine_tokens}")
        if self.prompt_of or self._out:
            raise Violation(f"groups without a record: {sorted(self.prompt_of)}, prompts in use: {sorted(self._out)}", self.prompt_of)
        for name in ("token", "attempt", "group"):
            shares = [value for key, value in machine.metrics().items() if key.startswith(f"ledger/{name}_share/")]
            if shares and not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
                raise Violation(f"the shares of {name}s sum to {sum(shares)}")
        if self.is_last:
            self._check_epochs()

    def _check_epochs(self) -> None:
        """The data have ended: every prompt of every epoch was drawn once, and once more for every time it came back."""
        for epoch in range(self.scenario.epochs or 0):
            for task in make_tasks(self.scenario.tasks, self.scenario.domains):
                prompt = task.task_id, epoch
                if self._times_drawn[prompt] != 1 + self._times_back[prompt]:
                    raise Violation(
                        f"the data have ended, but prompt {prompt} was drawn {self._times_drawn[prompt]} times and put back "
                        f"{self._times_back[prompt]} times"
                    )
