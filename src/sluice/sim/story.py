"""Events and instructions in words, one short line each: what a failure shows of a run."""

from __future__ import annotations

from sluice.scheduler import events as ev


def told(what: ev.Event | ev.Instruction) -> str:
    """An event or instruction in one short line."""
    match what:
        case ev.MemberFinished():
            rollout = what.rollout
            outcome = rollout.reward if rollout.failure is None else rollout.failure.reason
            return (
                f"MemberFinished attempt {rollout.attempt_id} (group {rollout.group_id}, member {rollout.member_index}): {outcome}, "
                f"{rollout.sampled_tokens} tokens, {rollout.finish_reason}, version {rollout.policy_version}"
            )
        case ev.LaunchMember():
            return f"LaunchMember attempt {what.attempt_id} (group {what.group_id}, member {what.member_index}), task {what.task.task_id}"
        case ev.TaskDrawn() | ev.ReturnTask():
            return f"{type(what).__name__} {what.task.task_id} of epoch {what.epoch}"
        case ev.RunLoop():
            return f"RunLoop (group {what.group_id}), task {what.task.task_id}"
        case ev.CancelLoop():
            return f"CancelLoop (group {what.group_id})"
        case ev.LoopAttempt():
            return f"LoopAttempt (group {what.group_id}, member {what.member_index})"
        case ev.AttemptRefused():
            return f"AttemptRefused (group {what.group_id}, member {what.member_index}): {what.reason}"
        case ev.MemberJudged():
            return f"MemberJudged attempt {what.attempt_id}: {what.verdict.reason}"
        case ev.GroupReturned():
            count = None if what.rollouts is None else len(what.rollouts)
            return f"GroupReturned (group {what.group_id}): {count} rollouts, judged {None if what.judged is None else what.judged.reason}"
        case ev.RecordGroup():
            record = what.record
            return (
                f"RecordGroup (group {record.group_id}): {record.outcome}, {record.category}/{record.reason}, round {record.round}, "
                f"steps {record.start_step} to {record.end_step}, {record.attempts} attempts, {record.sampled_tokens} tokens"
            )
        case ev.DeliverBatch():
            batch = what.batch
            ids = [group.group_id for group in batch.groups]
            return f"DeliverBatch of step {batch.step}: groups {ids} of {batch.requested} wanted, is_last {batch.is_last}"
        case ev.MemberFailed():
            return f"MemberFailed attempt {what.attempt_id}: {what.failure.reason}, {what.sampled_tokens} tokens"
        case ev.Warn() | ev.Fail():
            return f"{type(what).__name__}: {what.message}"
        case _:
            return repr(what)
