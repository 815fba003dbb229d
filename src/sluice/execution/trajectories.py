"""The player of trajectories: members are played turn by turn in environments, as many at once as there are seats.

Backpressure:

| who | waits for | unblocked by |
|---|---|---|
| an attempt | a seat | one that is given back, a cancel |
| | its environment | the answer, the environment's own limits, `dialogue.timeout_s`, a cancel |
| | the engine | its generation, `dialogue.timeout_s`, a cancel |
| | its siblings, where it is held | a release, a stop, a cancel |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sluice.config.agentic import AgenticConfig
from sluice.environments import EnvStep, episode_seed
from sluice.execution.dialogue import DialogueFormat
from sluice.execution.member import fixed
from sluice.execution.players import Shell
from sluice.execution.seats import Host, Seats
from sluice.execution.trajectory import Table, Trajectory
from sluice.execution.trajectory_counts import TrajectoryCounts, times_of
from sluice.generation.base import Engine, GenerationHandle
from sluice.scheduler import events as ev
from sluice.types import Failure, Rollout, Task, Turn

ENV_GROUP: Final = "env_group"  # entries of a task that say which episode it is
EPISODE: Final = "episode"


class TrajectoryPlayer:
    """Plays members that are trajectories. Make it on the event loop where it plays; environments belong to the host, which closes them."""

    def __init__(self, config: AgenticConfig, *, host: Host, engine: Engine, dialogue: DialogueFormat, seed: int) -> None:
        """seed: base of the environment seeds: with environment group and episode it makes the problem."""
        manager = config.train_env_manager
        seats = Seats(host, manager.num_env_groups * (manager.group_size + manager.group_size_redundancy))
        self.table = Table(
            engine=engine,
            dialogue=dialogue,
            seats=seats,
            sequence_length=config.sequence_length,
            max_tokens_per_turn=config.dialogue.max_tokens_per_turn,
            max_turns=config.dialogue.max_turns,
            timeout_s=config.dialogue.timeout_s,
        )
        self.counts = TrajectoryCounts()
        self.late_stops = 0  # of trajectories that had ended
        self.seed = seed
        self.temperature = config.engine.temperature
        self._loop = asyncio.get_running_loop()
        self._playing: dict[int, tuple[Trajectory, ev.LaunchMember]] = {}  # by attempt_id; those of which the machine waits to hear
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by attempt_id; also those on their way out

    def bind(self, shell: Shell) -> None:
        """Play for this shell."""
        self._shell = shell
        self._judges = shell.scheduler.config.on_member_failure == "judge"
        self._restarts = shell.scheduler.config.on_weight_update == "restart"
        self._has_gate = shell.scheduler.gate is not None

    def launch(self, launch: ev.LaunchMember) -> Failure | None:
        """Begin an attempt, as soon as there is a seat."""
        trajectory = Trajectory(
            self.table,
            number=launch.attempt_id,
            seed=launch.seed,
            env_seed=self.env_seed(launch.task),
            temperature=self.temperature,
            purpose="train",
            stepped=self._stepped,
            let_go=self._let_go,
        )
        attempt_id = launch.attempt_id
        self._playing[attempt_id] = trajectory, launch
        task = self._tasks[attempt_id] = self._loop.create_task(self._play(trajectory, launch), name=f"attempt {attempt_id}")
        task.add_done_callback(partial(self._left, attempt_id))
        return None

    def env_seed(self, task: Task) -> int:
        """The seed of a task's problem."""
        return episode_seed(self.seed, task.entry[ENV_GROUP], task.entry[EPISODE])

    def cancel(self, attempt_id: int) -> int | None:
        """Let go of an attempt: of its generation, its environment, or the wait for a seat."""
        playing = self._playing.pop(attempt_id, None)
        if playing is None:
            return None
        tokens = playing[0].let_go()
        self._tasks[attempt_id].cancel()
        return tokens

    def steer(self, order: ev.StopMember | ev.HoldMember | ev.ReleaseMember) -> None:
        """Stop, hold or release an attempt. One that has ended is left alone; a stop that came too late is counted."""
        playing = self._playing.get(order.attempt_id)
        match order:
            case ev.StopMember():
                self.late_stops += playing is None or not playing[0].stop()
            case ev.HoldMember() if playing is not None:
                playing[0].hold()
            case ev.ReleaseMember() if playing is not None:
                playing[0].release()

    def in_flight(self) -> dict[int, int]:
        """Attempts being played -> tokens sampled for each so far."""
        return {attempt_id: trajectory.tokens for attempt_id, (trajectory, _) in list(self._playing.items())}

    def generating(self, version: int) -> tuple[int, ...]:
        """Attempts that began to sample under older weights: whatever they are at now, they would go on under the new ones."""
        return tuple([attempt_id for attempt_id, (trajectory, _) in self._playing.items() if 0 <= trajectory.version < version])

    def pending(self) -> list[asyncio.Future[Any]]:
        """Tasks of attempts that were let go, until their environments are free."""
        return list(self._tasks.values())

    def metrics(self) -> dict[str, float]:
        """What became of trajectories since the start, and how many play and wait now. Names begin with `rollout/`."""
        seats = self.table.seats
        return {
            **self.counts.metrics(),
            "rollout/playing": float(seats.taken),
            "rollout/waiting": float(seats.waiting),
            "rollout/idle_env_share": seats.idle_share,
            **({"rollout/late_stops": float(self.late_stops)} if self.late_stops else {}),
        }

    # ------------------------------------------------------------ attempts

    async def _play(self, trajectory: Trajectory, launch: ev.LaunchMember) -> None:
        """One attempt, from its launch to what is told of it."""
        try:
            await trajectory.play()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - engine or environments as a whole, or a bug: raised where the batch is awaited
            self._shell.broken(error)
            return
        finally:
            self.counts.add(trajectory)
        if not trajectory.is_let_go:
            self._tell_end(trajectory, launch)

    def _left(self, attempt_id: int, _: asyncio.Task[None]) -> None:
        del self._tasks[attempt_id]

    def _tell_end(self, trajectory: Trajectory, launch: ev.LaunchMember) -> None:
        """Nothing may be awaited between the end of a trajectory and this: what comes late must be told after it."""
        attempt_id, shell = launch.attempt_id, self._shell
        if self._restarts and trajectory.is_mixed:  # it ended before the machine had heard of the update
            shell.tell(ev.WeightsUpdated(version=self.table.engine.policy_version, generating=(attempt_id,)))
            return
        del self._playing[attempt_id]
        failure, sampled = trajectory.failure, trajectory.sampled_tokens
        if failure is not None and not (self._judges and trajectory.finish_reason is not None):
            shell.tell(ev.MemberFailed(attempt_id=attempt_id, failure=failure, sampled_tokens=sampled, is_final=trajectory.is_final))
            return
        rollout = rollout_of(
            trajectory, attempt_id=attempt_id, group_id=launch.group_id, member_index=launch.member_index, task_id=launch.task.task_id
        )
        shell.tell(ev.MemberFinished(rollout=rollout))
        if sampled > rollout.sampled_tokens:  # of a turn that the time limit cut: it is no turn
            shell.tell(ev.LateTokens(attempt_id=attempt_id, sampled_tokens=sampled - rollout.sampled_tokens))

    def _stepped(self, trajectory: Trajectory, turn: Turn, step: EnvStep, progress_before: float | None) -> None:
        assert turn.action is not None, "an environment steps by an action"
        if not self._has_gate:
            self._shell.tell(ev.MemberStepped(trajectory.number, trajectory.env_steps, turn.action, turn.observation))
            return
        self._shell.tell(
            ev.MemberStepped(
                attempt_id=trajectory.number,
                env_step=trajectory.env_steps,
                action=turn.action,
                observation=turn.observation,
                reply=step.observation,
                reward=trajectory.reward,
                is_admissible=turn.is_admissible,
                progress=trajectory.progress,
                progress_before=progress_before,
                logprob=float(turn.inference_logprobs.mean()) if len(turn.inference_logprobs) else None,
                task_type=trajectory.task_type,
                is_last=trajectory.is_over,
            )
        )

    def _let_go(self, trajectory: Trajectory, handle: GenerationHandle, counted: int) -> None:
        self._shell.late.expect(trajectory.number, handle, counted)


def rollout_of(trajectory: Trajectory, *, attempt_id: int, group_id: int, member_index: int, task_id: str) -> Rollout:
    """What a trajectory that has ended delivers; without a reward where there is a failure."""
    return Rollout(
        attempt_id=attempt_id,
        group_id=group_id,
        member_index=member_index,
        task_id=task_id,
        turns=tuple(map(fixed, trajectory.turns)),
        finish_reason=trajectory.finish_reason or "cancelled",  # the engine gave it up
        reward=trajectory.reward if trajectory.failure is None else None,
        metrics=metrics_of(trajectory),
        failure=trajectory.failure,
        seconds=trajectory.total_s,
        flags=trajectory.flags,
        env_id=trajectory.env_id,
        task_type=trajectory.task_type,
    )


def metrics_of(trajectory: Trajectory) -> Mapping[str, float]:
    """What one trajectory has to tell beside its reward. success, progress, admissible_share: only where its environment says so."""
    engine_s, environment_s, seat_s, _, _ = times_of(trajectory)
    metrics = {
        "turns": float(len(trajectory.turns)),
        "env_steps": float(trajectory.env_steps),
        "truncated_turns": float(trajectory.truncated_turns),
        "engine_seconds": engine_s,
        "environment_seconds": environment_s,
        "seat_seconds": seat_s,
    }
    if trajectory.success is not None:
        metrics["success"] = float(trajectory.success)
    if trajectory.progress is not None:
        metrics["progress"] = trajectory.progress
    if trajectory.judged_actions:
        metrics["admissible_share"] = trajectory.admissible_actions / trajectory.judged_actions
    return MappingProxyType(metrics)
