"""The machine under any events in any order, told one by one: the counts hold, and a run that is shut down comes to rest."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.config.models import FilterConfig
from sluice.filters import RatioGuard
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import Scheduler
from sluice.scheduler import events as ev
from sluice.types import Verdict
from tests.fakes import NO_FILTER, DomainSource, ListSource, MachinePlayer, make_rollout, make_task

RANGE = FilterConfig(type="reward_range", filter_args={"low": 0.0, "high": 1.0})
DOMAINS = ("code", "math")


@st.composite
def players(draw: st.DrawFn) -> MachinePlayer:
    """A machine of any settings, with its source."""
    size = draw(st.integers(1, 3))
    ratio = draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5]))
    fill = draw(st.sampled_from(["refill", "refill", "shrink"]))
    collect = draw(st.sampled_from(["as_finished", "in_order"])) if fill == "refill" else "as_finished"
    by_ticket = fill == "shrink" or collect == "in_order"
    mixed = draw(st.booleans())
    carries = ratio == 0 and fill == "refill" and draw(st.booleans())
    tasks = draw(st.none() | st.integers(0, 12))
    return MachinePlayer.make(
        query=NO_FILTER if size == 1 else draw(st.sampled_from([NO_FILTER, FilterConfig(type="std_filter")])),
        response=draw(st.none() | st.just(RANGE)),
        source=DomainSource(DOMAINS, None if tasks is None else dict.fromkeys(DOMAINS, tasks))
        if mixed
        else ListSource(make=lambda i: make_task(f"t{i}"))
        if tasks is None
        else ListSource(make_task(f"t{i}") for i in range(tasks)),
        domains=DOMAINS,
        guard=draw(
            st.none() | st.builds(RatioGuard, st.sampled_from([0.0, 0.5]), policy=st.sampled_from(["keep", "wait", "shrink", "raise"]))
        ),
        group_size=size,
        redundancy=draw(st.integers(0, 1)),
        fill=fill,
        collect=collect,
        max_resample_rounds=draw(st.integers(1, 4)),
        max_groups_per_batch=draw(st.none() | st.integers(2, 6)) if fill == "refill" else None,
        max_response_rounds=draw(st.integers(1, 3)),
        on_exhausted=draw(st.sampled_from(["raise", "shrink", "keep_low_information"])),
        min_members=draw(st.none() | st.integers(1, size)),
        truncated=draw(st.sampled_from(["mask", "keep", "invalid", "drop_group"])),
        on_member_failure=draw(st.sampled_from(["replace", "judge"])),
        max_additional_running_prompts=0 if by_ticket else draw(st.integers(0, 2)),
        async_generation_ratio=ratio,
        on_weight_update=draw(st.sampled_from(["finish", "restart", "continue"])),
        surplus="carry" if carries else None,
        max_staleness=1 if carries else draw(st.sampled_from([None, 2])),
        domain_shares=dict.fromkeys(DOMAINS, 1.0) if mixed else None,
        mix_on=draw(st.sampled_from(["kept", "drawn"])),
        group_timeout_s=draw(st.none() | st.just(20.0)),
        requeue=draw(st.booleans()),
        quarantine_after=draw(st.none() | st.integers(1, 2)),
        stall_warning_s=draw(st.none() | st.just(5.0)),
        has_user_loop=draw(st.booleans()) and draw(st.booleans()),
    )


class Runs(RuleBasedStateMachine):
    """One run. The player checks its counts after every event; what it is told is whatever a shell could be told."""

    player: MachinePlayer

    @initialize(player=players(), hold_acks=st.booleans(), hold_draws=st.booleans())
    def begin(self, player: MachinePlayer, hold_acks: bool, hold_draws: bool) -> None:
        self.player = player
        player.hold_acks, player.hold_draws = hold_acks, hold_draws
        self.version = 0
        self.let_go: list[int] = []  # attempts whose cancel was acknowledged

    # ------------------------------------------------------------ the trainer

    @precondition(lambda self: self.is_idle and not self.is_training)
    @rule(left=st.none() | st.integers(0, 2))
    def want(self, left: int | None) -> None:
        self.player.want(2, left)

    @precondition(lambda self: self.is_training)
    @rule(publishes=st.booleans())
    def step(self, publishes: bool) -> None:
        self.player.advance()
        if publishes:
            self.publish()

    @rule()
    def publish(self) -> None:
        self.version = self.player.scheduler.step
        self.player.publish(self.version, self.player.pending)

    # ------------------------------------------------------------ tasks and members

    @precondition(lambda self: self.player.draws)
    @rule()
    def answer_draw(self) -> None:
        self.player.answer_draw()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["good", "good", "good", "bad", "odd", "missing", "truncated"]), tokens=st.integers(0, 3))
    def finish(self, data: st.DataObject, how: str, tokens: int) -> None:
        reward = {"good": 1.0, "bad": 0.0, "odd": 7.0, "missing": None, "truncated": 1.0}[how]
        reason = "length" if how == "truncated" else "stop"
        attempt_id = data.draw(st.sampled_from(self.running))
        self.player.finish(attempt_id, reward, tokens=tokens, finish_reason=reason, version=min(self.version, self.player.scheduler.step))  # type: ignore[arg-type]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reason=st.sampled_from(["engine_error", "refused"]))
    def fail(self, data: st.DataObject, reason: str) -> None:
        cause: Any = "infrastructure" if reason == "engine_error" else "policy"
        self.player.fail(data.draw(st.sampled_from(self.running)), cause=cause, reason=reason)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 3))
    def lose_worker(self, count: int) -> None:
        self.player.lose_worker(self.running[:count])

    @precondition(lambda self: self.player.acks)
    @rule()
    def acknowledge(self) -> None:
        attempt_id = self.player.acks.pop(0)
        self.player.carry_out(self.player.acknowledge(attempt_id))
        self.let_go.append(attempt_id)

    @precondition(lambda self: self.let_go)
    @rule(tokens=st.integers(0, 2))
    def sample_late(self, tokens: int) -> None:
        self.player.engine_tokens += tokens
        self.player.tell(ev.LateTokens(attempt_id=self.let_go[-1], sampled_tokens=tokens))

    @precondition(lambda self: self.let_go)
    @rule()
    def deliver_late(self) -> None:
        launch = next(launch for launch in self.player.launches if launch.attempt_id == self.let_go[-1])
        before = self.player.scheduler.ledger.late_results
        self.player.tell(ev.MemberFinished(rollout=make_rollout(launch)))
        assert self.player.scheduler.ledger.late_results == before + 1

    # ------------------------------------------------------------ user-defined loops

    @precondition(lambda self: self.player.open_loops)
    @rule(data=st.data())
    def start_attempt(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.player.open_loops)))
        group = self.player.scheduler._groups[group_id]
        index = data.draw(st.integers(0, len(group.slots) - 1))
        if group.slots[index] < 0:
            self.player.start_attempt(group_id, index)

    @precondition(lambda self: self.player.open_loops)
    @rule(data=st.data(), how=st.sampled_from(["all", "all", "none", "judged"]))
    def return_group(self, data: st.DataObject, how: str) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.player.open_loops)))
        group = self.player.scheduler._groups[group_id]
        rollouts = [rollout for rollout in group.delivered if rollout is not None]
        judged = Verdict.dropped("no", "low_information", "loop") if how == "judged" else None
        self.player.give_back(group_id, None if how == "none" else rollouts, judged=judged)

    # ------------------------------------------------------------ time, checkpoints and the end

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 21.0]))
    def sleep(self, seconds: float) -> None:
        self.player.sleep(seconds)

    @rule()
    def tick(self) -> None:
        self.player.tell(ev.ClockTick(), 0.0)

    @rule()
    def save(self) -> None:
        """A checkpoint changes nothing, and a fresh machine takes it."""
        machine = self.player.scheduler
        before = machine.ledger.state_dict(), machine.buffer.state_dict(), machine.snapshot(0.0)
        saved = decode(encode(machine.state_dict(dict.fromkeys(self.player.pending, 1))))
        assert (machine.ledger.state_dict(), machine.buffer.state_dict(), machine.snapshot(0.0)) == before
        fresh = Scheduler(
            machine.config, machine.filters, guard=None if machine.guard is None else RatioGuard(0.5, policy=machine.guard.policy)
        )
        tasks = {launch.task.task_id: launch.task for launch in self.player.launches} | {
            order.task.task_id: order.task for order in self.player.instructions if isinstance(order, ev.RunLoop)
        }
        records = fresh.load_state_dict(saved, tasks)
        assert len(records) + fresh.open_groups == machine.open_groups
        assert fresh.running_attempts == 0
        assert fresh.ledger.total_tokens == machine.ledger.total_tokens + len(self.player.pending)
        assert sum(fresh.ledger.groups.values()) + fresh.open_groups == fresh.ledger.groups_launched

    def teardown(self) -> None:
        if not hasattr(self, "player"):
            return
        player = self.player
        player.tell(ev.Shutdown())
        player.acknowledge_all()
        while player.draws:
            player.answer_draw()
        machine = player.scheduler
        assert not player.pending
        assert machine.open_groups == machine.running_attempts == machine.buffer.running == machine.buffer.committed == 0
        assert machine.ledger.tokens["open"] == machine.ledger.open_attempts == 0
        assert sum(machine.ledger.groups.values()) == machine.ledger.groups_launched == len(player.records)
        assert sum(record.sampled_tokens for record in player.records) + machine.ledger.tokens["late"] == player.engine_tokens

    # ------------------------------------------------------------ where the run stands

    @property
    def running(self) -> list[int]:
        """Attempts that can still end."""
        return sorted(self.player.pending)

    @property
    def is_idle(self) -> bool:
        return self.player.scheduler.filling is None

    @property
    def is_training(self) -> bool:
        return bool(self.player.scheduler._delivered)

    @invariant()
    def what_is_waited_for_is_said(self) -> None:
        if hasattr(self, "player") and not self.is_idle:
            assert self.player.scheduler.waiting_for(self.player.now) not in ("", "nothing")


TestRuns = Runs.TestCase
TestRuns.settings = settings(stateful_step_count=60)
