"""What a machine saves and how it goes on from that: plain data and numpy arrays.

Committed groups are saved whole; so are those of a batch that was delivered and not stepped on, since that step is not in the checkpoint.
A running group is never saved: it restarts as a whole, so that no group mixes members of two processes. In the saved ledger it has left as
cancelled, with the tokens that it had cost by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sluice.errors import GateError, RecordError
from sluice.ledger import Ledger
from sluice.scheduler import events as ev
from sluice.scheduler.groups import OpenGroup
from sluice.scheduler.slots import ClosedPlace, Slot
from sluice.types import Failure, Group, Rollout, Task, Turn

if TYPE_CHECKING:
    from sluice.scheduler.core import Core

VERSION: Final = 2
RESTART: Final = "restart"  # reason for which groups under way at a checkpoint are cancelled in it


def save(machine: Core, in_flight: Mapping[int, int], now: float | None) -> dict[str, Any]:
    """The state of a machine, which is not changed. now: None when nobody knows the time."""
    ledger = Ledger()
    ledger.load_state_dict(machine.ledger.state_dict())
    whole = {group.group_id: group for group in machine.buffer.groups()}
    delivered = {group.group_id for group in machine._delivered}
    committed: list[dict[str, Any]] = []
    interrupted: list[dict[str, Any]] = []
    again = list(machine.slots.owed)  # given out, and no group came of them
    outstanding: list[list[Any]] = [[task.task_id, epoch] for task, epoch in machine.prompts.later]
    tokens = {id(group): 0 for group in machine._groups.values()}
    for attempt_id, group in machine._running.items():
        sampled = in_flight.get(attempt_id, 0)
        tokens[id(group)] += sampled
        ledger.attempt_ended("cut" if group.outcome == "cut" else "cancelled", sampled)
    for group in machine._groups.values():
        if group.outcome is None and (group.group_id in whole or group.group_id in delivered):
            kept = whole.get(group.group_id)
            last_step = machine.buffer.last_step(group.group_id) if kept is not None else machine.step
            committed.append(_save_group(group, _regrouped(group) if kept is None else kept, last_step, tokens[id(group)]))
            continue
        record = _record(group, tokens[id(group)], group.started_at if now is None else now)
        if group.outcome is None:
            spare = any(entry[0] is group for entry in machine._spare)
            held = any(entry[0] is group for entry in machine._held)
            outcome = "dropped" if spare else "discarded" if held else "cancelled"
            members = len(group.delivered) - group.delivered.count(None)
            ledger.members_left("discarded" if outcome == "cancelled" else outcome, members, group.open_tokens)
            verdict = next((entry[2] for entry in machine._spare if entry[0] is group), None)
            category, reason = (verdict.category, verdict.reason) if verdict is not None else (None, RESTART)
            ledger.group_left(outcome, category, reason)
            record |= {
                "outcome": outcome,
                "reason": reason,
                "category": category,
                "source": "scheduler" if verdict is None else verdict.source,
            }
            record["end_step"] = machine.step
            if not spare and not held:
                outstanding.append([group.task.task_id, group.epoch])
                again.append(group.slot)
        interrupted.append(record)
    return {
        "version": VERSION,
        "group_size": machine.config.group_size,
        "seed": machine.config.seed,
        "step": machine.step,
        "next_attempt": machine._next_attempt,
        "next_group": machine._next_group,
        "open_groups": list(machine._groups),
        # A batch that was delivered and not stepped on has taken nothing: its groups are committed here.
        "buffer": machine.buffer.state_dict() | ({"taken_of_oldest": 0} if delivered else {}),
        "slots": machine.slots.state_dict() | ({"base": machine.slots.base - machine._requested} if delivered else {}),
        "again": [list(slot) for slot in sorted(again, key=lambda slot: slot.ticket)],
        "prompts": machine.prompts.state_dict(outstanding),
        "guard": None if machine.guard is None else machine.guard.state_dict(),
        "gate": None if machine.gate is None else machine.gate.state_dict(),
        "closed": None if machine._closed is None else [list(place) for place in machine._closed],
        "closed_ahead": [list(place) for place in machine._closed_ahead],
        "ledger": ledger.state_dict(),
        "judged": machine._judged,
        "kept": machine._kept,
        "empty_in_a_row": machine._empty_in_a_row,
        "absent": dict(machine._absent),
        "first_details": [[domain, reason, detail] for (domain, reason), detail in machine._first_details.items()],
        "committed": committed,
        "interrupted": interrupted,
        "outstanding": outstanding,
    }


def load(machine: Core, saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> list[ev.Instruction]:
    """Bring a fresh machine to a saved state; the records of the groups that were interrupted."""
    if machine._next_group or machine._next_attempt:
        raise RecordError("expected a fresh machine to load a state into, got one that has launched groups - make a new one")
    try:
        _check(machine, saved)
        machine.step = int(saved["step"])
        machine._next_attempt = int(saved["next_attempt"])
        machine._next_group = int(saved["next_group"])
        machine.buffer.load_state_dict(saved["buffer"])
        machine.slots.load_state_dict(saved["slots"])
        if machine.config.fill == "shrink":  # elsewhere what is missing is opened anew
            machine.slots.owed.extend([Slot(*slot) for slot in saved["again"]])
        machine.prompts.load_state_dict(saved["prompts"])
        if machine.guard is not None and saved["guard"] is not None:
            machine.guard.load_state_dict(saved["guard"])
        if machine.gate is not None and saved["gate"] is not None:
            machine.gate.load_state_dict(saved["gate"])
        closed = saved.get("closed")  # older checkpoints do not tell
        machine._closed = None if closed is None else [ClosedPlace(*place) for place in closed]
        machine._closed_ahead = [ClosedPlace(*place) for place in saved["closed_ahead"]]
        machine.ledger.load_state_dict(saved["ledger"])
        machine._judged, machine._kept = int(saved["judged"]), int(saved["kept"])
        machine._empty_in_a_row = int(saved["empty_in_a_row"])
        machine._absent = {domain: int(saved["absent"].get(domain, 0)) for domain in machine._absent}
        machine._first_details = {(domain, reason): detail for domain, reason, detail in saved["first_details"]}
        for entry in saved["committed"]:
            _load_group(machine, entry, tasks)
        return [ev.RecordGroup(record=ev.GroupRecord(**_as_record(record))) for record in saved["interrupted"]]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, RecordError | GateError):
            raise
        raise RecordError(f"the saved state of the scheduler is torn or not ours: {type(error).__name__}: {error}") from error


def _check(machine: Core, saved: Mapping[str, Any]) -> None:
    for key, expected in (("version", VERSION), ("group_size", machine.config.group_size), ("seed", machine.config.seed)):
        if saved[key] != expected:
            advice = "resume with the settings of the saved run"
            raise RecordError(f"the saved state of the scheduler does not fit: {key} must be {expected}, got {saved[key]} - {advice}")


# ---------------------------------------------------------------- groups


def _regrouped(group: OpenGroup) -> Group:
    """The group that was made of these members."""
    members = [(rollout, counted) for rollout, counted in zip(group.delivered, group.counted, strict=True) if rollout is not None]
    return Group(
        group_id=group.group_id,
        task=group.task,
        rollouts=tuple(rollout for rollout, _ in members),
        start_step=group.start_step,
        round=group.round,
        epoch=group.epoch,
        counted=tuple(counted and rollout.reward is not None for rollout, counted in members),
    )


def _save_group(group: OpenGroup, whole: Group, last_step: int, running_tokens: int) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "epoch": group.epoch,
        "slot": list(group.slot),
        "start_step": group.start_step,
        "last_step": last_step,
        "seconds": group.story[-1][0] - group.story[0][0] if group.restored_s is None else group.restored_s,
        "attempts": group.attempts,
        "tokens": group.tokens + running_tokens,
        "env_steps": group.env_steps,
        "reason": group.reason,
        "source": group.source,
        "evidence": _plain_entries({**group.evidence, **group.gate_evidence}),
        "counted": list(whole.counted),
        "rollouts": [_save_rollout(rollout) for rollout in whole.rollouts],
    }


def _plain(number: Any) -> Any:
    """What user code gives may be of numpy."""
    return number.item() if isinstance(number, np.generic) else number


def _plain_entries(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: _plain(number) for name, number in numbers.items()}


def _save_rollout(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "attempt_id": rollout.attempt_id,
        "member_index": rollout.member_index,
        "finish_reason": rollout.finish_reason,
        "reward": _plain(rollout.reward),
        "metrics": _plain_entries(rollout.metrics),
        "failure": None if failure is None else [failure.cause, failure.reason, failure.detail],
        "seconds": rollout.seconds,
        "flags": sorted(rollout.flags),
        "env_id": rollout.env_id,
        "task_type": rollout.task_type,
        "turns": [
            {
                "prompt_ids": turn.prompt_ids,
                "token_ids": turn.token_ids,
                "inference_logprobs": turn.inference_logprobs,
                "text": turn.text,
                "finish_reason": turn.finish_reason,
                "policy_version": turn.policy_version,
                "token_versions": turn.token_versions,
                "observation": turn.observation,
                "action": turn.action,
                "is_admissible": turn.is_admissible,
                "reward": turn.reward,
                "progress": turn.progress,
            }
            for turn in rollout.turns
        ],
    }


def _load_group(machine: Core, entry: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    task = tasks.get(entry["task_id"])
    if task is None:
        raise RecordError(f"task {entry['task_id']!r} of a saved group is not in the data - resume with the data of the saved run")
    places = machine.config.redundancy
    if machine.config.has_user_loop:  # which may have begun further members
        places = max(places, *[int(saved["member_index"]) + 1 - machine.config.group_size for saved in entry["rollouts"]])
    group = OpenGroup(
        group_id=int(entry["group_id"]),
        task=task,
        epoch=int(entry["epoch"]),
        slot=Slot(*entry["slot"]),
        start_step=int(entry["start_step"]),
        size=machine.config.group_size,
        redundancy=places,
        seed=machine.config.seed,
        now=0.0,
    )
    group.closed = True
    group.missing = 0
    group.restored_s = float(entry["seconds"])
    group.attempts, group.tokens, group.env_steps = int(entry["attempts"]), int(entry["tokens"]), int(entry["env_steps"])
    group.reason, group.source, group.evidence = entry["reason"], entry["source"], dict(entry["evidence"])
    group.story.append((0.0, "committed, restored from a checkpoint", machine.step))
    rollouts = tuple(_load_rollout(saved, group.group_id, task.task_id) for saved in entry["rollouts"])
    for rollout, counted in zip(rollouts, entry["counted"], strict=True):
        group.delivered[rollout.member_index] = rollout
        group.counted[rollout.member_index] = bool(counted)
        group.open_tokens += rollout.sampled_tokens
    machine._groups[group.group_id] = group
    whole = Group(
        group_id=group.group_id,
        task=task,
        rollouts=rollouts,
        start_step=group.start_step,
        round=group.round,
        epoch=group.epoch,
        counted=tuple(bool(counted) for counted in entry["counted"]),
    )
    machine.buffer.restore(whole, int(entry["last_step"]), machine.config.domain_staleness.get(task.domain))


def _load_rollout(saved: Mapping[str, Any], group_id: int, task_id: str) -> Rollout:
    return Rollout(
        attempt_id=int(saved["attempt_id"]),
        group_id=group_id,
        member_index=int(saved["member_index"]),
        task_id=task_id,
        turns=tuple(Turn(**turn) for turn in saved["turns"]),
        finish_reason=saved["finish_reason"],
        reward=saved["reward"],
        metrics=dict(saved["metrics"]),
        failure=None if saved["failure"] is None else Failure(**dict(zip(("cause", "reason", "detail"), saved["failure"], strict=True))),
        seconds=float(saved["seconds"]),
        flags=frozenset(saved["flags"]),
        env_id=saved["env_id"],
        task_type=saved["task_type"],
    )


# ---------------------------------------------------------------- records


def _record(group: OpenGroup, running_tokens: int, now: float) -> dict[str, Any]:
    record = group.record(now)
    out = {name: getattr(record, name) for name in record.__slots__}
    rewards = [_plain(reward) for reward in record.rewards]
    return out | {"rewards": rewards, "evidence": _plain_entries(record.evidence), "sampled_tokens": group.tokens + running_tokens}


def _as_record(saved: Mapping[str, Any]) -> dict[str, Any]:
    return dict(saved) | {"rewards": tuple(saved["rewards"])}
