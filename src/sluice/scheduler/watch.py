"""What the machine is doing, for a person: what a batch waits for, and where everything stands."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.scheduler.core import Core
    from sluice.scheduler.groups import OpenGroup


def waiting_for(machine: Core, now: float) -> str:
    """What the batch waits for, in words; "" when no batch is wanted."""
    if machine._wanted is None:
        return ""
    causes = []
    if machine._waits_for_weights():
        causes.append(
            f"weights: the trainer is at step {machine.step}, the engine samples with version {machine.version}, "
            f"and groups may be at most {machine._least_staleness} steps old"
        )
    drawing = machine.slots.drawing
    if drawing:
        causes.append(f"{drawing} prompt{'' if drawing == 1 else 's'} from the task source")
    oldest = _oldest(machine)
    if oldest is not None:
        groups, attempts = machine.buffer.running - len(machine._held), len(machine._running)
        loops = sum([group.has_loop for group in machine._groups.values()])
        held = sum([len(group.held) for group in machine._groups.values()])
        what = f"{attempts} members of {groups} groups" if not loops else f"{loops} rollout loops with {attempts} members under way"
        if held:
            what += f", of which {held} wait for the decision of the gate"
        causes.append(
            f"{what}; the oldest is group {oldest.group_id} (task {oldest.task.task_id!r}), since {now - oldest.started_at:.1f} s"
        )
    return "; and for ".join(causes) or "nothing"


def snapshot(machine: Core, now: float) -> dict[str, Any]:
    """Where everything stands, as plain data for JSON."""
    oldest = _oldest(machine)
    filling = machine.filling
    rejected: Counter[str] = Counter()
    for (category, reason), count in machine.ledger.rejected_groups.items():
        rejected[f"{category}/{reason}"] += count
    if machine.buffer.expired:
        rejected["expired/stale"] = machine.buffer.expired
    return {
        "step": machine.step,
        "policy_version": machine.version,
        "wanted": None if filling is None else filling[1],
        "kept": None if filling is None else filling[0],
        "running_groups": machine.buffer.running,
        "running_attempts": len(machine._running),
        "committed": machine.buffer.committed,
        "held_by_guard": len(machine._held),
        "draws": machine.slots.drawing,
        "waiting_for": waiting_for(machine, now),
        "waiting_since_s": None if filling is None else now - machine._wanted_since,
        "acceptance_rate": machine.acceptance_rate,
        "oldest_group": None
        if oldest is None
        else {"group_id": oldest.group_id, "task_id": oldest.task.task_id, "age_s": now - oldest.started_at},
        "groups_launched": machine.ledger.groups_launched,
        "rejected": dict(rejected),
        "quarantined": len(machine.prompts.quarantined),
        "tokens": machine.ledger.total_tokens,
        "gate": None if machine.gate is None else machine.gate.metrics(machine.ledger.tokens_per_env_step),
    }


def _oldest(machine: Core) -> OpenGroup | None:
    """The group that has been under way for longest: groups are kept in the order of their launch."""
    return next((group for group in machine._groups.values() if not group.closed), None)
