"""The player of trajectories with the real machine and shell: what is sampled is what trains, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from sluice.config.agentic import AgenticConfig
from sluice.environments import EnvironmentHost
from sluice.execution import LocalShell
from sluice.execution.clock import run
from sluice.execution.dialogue import build_dialogue_format
from sluice.execution.trajectories import TrajectoryPlayer
from sluice.generation import Answer, GenerationRequest, NullEngine
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.tasks import EpisodeTasks
from sluice.trainer.assemble import samples_from_batch
from sluice.types import Batch, Rollout
from tests.execution.test_shell import ListJournal, everything_left
from tests.fakes import NO_FILTER, LossyTokenizer, ScriptedEnvironment, make_filters

TOKENIZER = LossyTokenizer()
DOMAIN = "rooms"

Says = Callable[[GenerationRequest], str]


def config(**changes: Any) -> AgenticConfig:
    """A small agentic run; `dialogue` and `train_env_manager` are merged."""
    manager = {"num_env_groups": 2, "group_size": 4, **changes.pop("train_env_manager", {})}
    dialogue = {"max_tokens_per_turn": 32, **changes.pop("dialogue", {})}
    return AgenticConfig(
        **{
            "pipeline": "agentic",
            "exp_name": "test",
            "model": {"path": "nowhere"},
            "environment": {"type": DOMAIN, "run_in": "inline"},
            "trainer": {"max_steps": 1, "learning_rate": 1e-3},
            "rollout_batch_size": manager["num_env_groups"] * manager["group_size"],
            "sequence_length": 1000,
            "train_env_manager": manager,
            "dialogue": dialogue,
            **changes,
        }
    )


class Engine(NullEngine):
    """Writes what a function says, in tokens that encoding would not give, and remembers every answer."""

    def __init__(self, says: Says | None = None, *, latency_s: Callable[[GenerationRequest], float] | float = 0.0, **settings: Any) -> None:
        super().__init__(self._answer_to, **settings)
        self.says = (lambda request: "go north") if says is None else says
        self.latency_s = latency_s if callable(latency_s) else lambda request: latency_s
        self.requests: list[GenerationRequest] = []
        self.answers: dict[int, list[Answer]] = {}  # dialogue_id -> its answers, in order

    def _answer_to(self, request: GenerationRequest) -> Answer:
        self.requests.append(request)
        text = self.says(request)
        ids = np.array([*TOKENIZER.written(text), TOKENIZER.eos_token_id], dtype=np.int64)
        logprobs = -np.random.default_rng(request.seed).random(len(ids)).astype(np.float32)
        answer = Answer(token_ids=ids, inference_logprobs=logprobs, latency_s=self.latency_s(request))
        assert request.dialogue_id is not None
        self.answers.setdefault(request.dialogue_id, []).append(answer)
        return answer

    @property
    def open_dialogues(self) -> int:
        return int(self.metrics()["engine/dialogues"])


class World:
    """One shell with a player of trajectories, and what is around it."""

    def __init__(self, shell: LocalShell, player: TrajectoryPlayer, engine: Engine, host: EnvironmentHost) -> None:
        self.shell, self.player, self.engine, self.host = shell, player, engine, host
        self.step = 0

    async def batch(self, groups: int = 2) -> Batch:
        batch, _ = await self.shell.next_batch(groups)
        self.step += 1
        self.engine.publish({}, self.step)
        self.shell.step_advanced(self.step)
        return batch

    def check_nothing_is_left(self) -> None:
        everything_left(self.shell)
        assert not self.player.pending()
        assert not self.player.in_flight()
        assert self.player.table.seats.taken == 0
        assert self.player.table.seats.waiting == 0
        assert self.player.table.seats.idle_share == 0
        assert self.engine.open_requests == 0
        assert self.engine.open_dialogues == 0
        assert all(runner.running is None for runner in self.host._runners)


@asynccontextmanager
async def world(
    make: Callable[[], Any] = ScriptedEnvironment, engine: Engine | None = None, settings: AgenticConfig | None = None, **machine: Any
) -> AsyncIterator[World]:
    settings = config() if settings is None else settings
    manager = settings.train_env_manager
    engine = Engine() if engine is None else engine
    scheduler_config = SchedulerConfig(
        **{
            "group_size": manager.group_size,
            "redundancy": manager.group_size_redundancy,
            "on_weight_update": settings.on_weight_update,
            "on_member_failure": settings.on_member_failure,
            **machine,
        }
    )
    async with EnvironmentHost(settings.environment, settings.env_monitor, build=make) as host:
        player = TrajectoryPlayer(
            settings, host=host, engine=engine, dialogue=build_dialogue_format(settings.dialogue, TOKENIZER), seed=settings.seed
        )
        shell = LocalShell(
            scheduler=Scheduler(scheduler_config, make_filters(NO_FILTER, domains=[DOMAIN])),
            source=EpisodeTasks(DOMAIN, manager.num_env_groups, seed=settings.seed),
            engine=engine,
            journal=ListJournal(),
            player=player,
        )
        out = World(shell, player, engine, host)
        try:
            yield out
        finally:
            await shell.close()
        out.check_nothing_is_left()


def rollouts(batch: Batch) -> list[Rollout]:
    return [rollout for group in batch.groups for rollout in group.rollouts]


def test_a_batch_of_trajectories_holds_what_engine_and_environments_said() -> None:
    async def main() -> None:
        async with world() as one:
            batch = await one.batch()
            assert [len(group.rollouts) for group in batch.groups] == [4, 4]
            for rollout in rollouts(batch):
                assert rollout.finish_reason == "max_turns"
                assert rollout.reward == pytest.approx(0.75)
                assert rollout.env_steps == 3
                assert [turn.action for turn in rollout.turns] == ["go north"] * 3
                assert [turn.is_admissible for turn in rollout.turns] == [True] * 3
                assert rollout.turns[1].observation == "after go north"
                assert rollout.metrics["turns"] == 3
                assert rollout.metrics["admissible_share"] == 1
                assert rollout.task_type == "rooms"
            assert all(record.env_steps == 12 for record in one.shell.journal.records)  # type: ignore[attr-defined]

    run(main())


def test_what_the_trainer_gets_is_what_the_engine_sampled_token_by_token() -> None:
    async def main() -> None:
        async with world() as one:
            batch = await one.batch()
            for sample in samples_from_batch(batch):
                answers = one.engine.answers[sample.attempt_id]
                requests = [request for request in one.engine.requests if request.dialogue_id == sample.attempt_id]
                assert np.array_equal(sample.prompt_ids, requests[0].prompt_ids)
                parts = [answers[0].token_ids]
                for request, answer in zip(requests[1:], answers[1:], strict=True):
                    parts += [request.prompt_ids, answer.token_ids]
                assert np.array_equal(sample.completion_ids, np.concatenate(parts))
                assert np.array_equal(sample.completion_ids[sample.loss_mask], np.concatenate([answer.token_ids for answer in answers]))
                assert np.array_equal(
                    sample.inference_logprobs[sample.loss_mask], np.concatenate([answer.inference_logprobs for answer in answers])
                )

    run(main())


def test_all_members_of_an_episode_play_the_same_problem_and_sample_differently() -> None:
    async def main() -> None:
        async with world() as one:
            batch = await one.batch()
            assert all(len({rollout.env_id for rollout in group.rollouts}) == 1 for group in batch.groups)
            assert len({group.rollouts[0].env_id for group in batch.groups}) == 2
            seeds = [request.seed for request in one.engine.requests]
            assert len(set(seeds)) == len(seeds)

    run(main())
