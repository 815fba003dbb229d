"""A shell with a player of trajectories, and the world around it: small environments, an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np

from sluice.config.agentic import AgenticConfig
from sluice.environments import EnvironmentHost
from sluice.errors import RequestRefused
from sluice.execution import LocalShell
from sluice.execution.dialogue import build_dialogue_format
from sluice.execution.trajectories import TrajectoryPlayer
from sluice.filters import DomainFilters
from sluice.filters.base import Filter
from sluice.filters.group_rewards import GroupRewards
from sluice.generation import Answer, Engine, GenerationRequest, NullEngine
from sluice.generation.null import NullHandle
from sluice.scheduler import GroupRecord, MachineGate, Scheduler, SchedulerConfig
from sluice.tasks import EpisodeTasks
from sluice.types import Batch, Rollout, Verdict
from tests.execution.test_shell import ListJournal, everything_left
from tests.fakes import DelayedHost, LossyTokenizer, ScriptedEnvironment

TOKENIZER = LossyTokenizer()
DOMAIN = "rooms"

Says = Callable[[GenerationRequest], str]
Host = EnvironmentHost | DelayedHost


def config(**changes: Any) -> AgenticConfig:
    """A small agentic run; changes of `dialogue`, `environment` and `train_env_manager` are merged."""
    manager = {"num_env_groups": 2, "group_size": 4, **changes.pop("train_env_manager", {})}
    dialogue = {"max_tokens_per_turn": 32, **changes.pop("dialogue", {})}
    environment = {"type": DOMAIN, "run_in": "inline", **changes.pop("environment", {})}
    return AgenticConfig(
        **{
            "pipeline": "agentic",
            "exp_name": "test",
            "model": {"path": "nowhere"},
            "environment": environment,
            "trainer": {"max_steps": 1, "learning_rate": 1e-3},
            "rollout_batch_size": manager["num_env_groups"] * manager["group_size"],
            "sequence_length": 1000,
            "train_env_manager": manager,
            "dialogue": dialogue,
            **changes,
        }
    )


class SayingEngine(NullEngine):
    """Writes what a function says, in tokens that encoding would not give, and remembers every answer.

    error: from a request to the text with which it fails; None: it does not. refuse: whether it can never be served.
    """

    def __init__(
        self,
        says: Says = lambda request: "go north",
        *,
        latency_s: Callable[[GenerationRequest], float] | float = 0.0,
        error: Callable[[GenerationRequest], str | None] = lambda request: None,
        refuse: Callable[[GenerationRequest], bool] = lambda request: False,
        **settings: Any,
    ) -> None:
        super().__init__(self._answer_to, **settings)
        self.says = says
        self.latency_s = latency_s if callable(latency_s) else lambda request: latency_s
        self.error = error
        self.refuse = refuse
        self.requests: list[GenerationRequest] = []
        self.answers: dict[int, list[Answer]] = {}  # dialogue_id -> its answers, in order

    def submit(self, request: GenerationRequest) -> NullHandle:
        if self._stopped is None and self.refuse(request):
            raise RequestRefused("too long for this engine")
        return super().submit(request)

    def _answer_to(self, request: GenerationRequest) -> Answer:
        self.requests.append(request)
        ids = np.array([*TOKENIZER.written(self.says(request)), TOKENIZER.eos_token_id], dtype=np.int64)
        logprobs = -np.random.default_rng(request.seed).random(len(ids)).astype(np.float32)
        answer = Answer(token_ids=ids, inference_logprobs=logprobs, latency_s=self.latency_s(request), error=self.error(request))
        assert request.dialogue_id is not None
        self.answers.setdefault(request.dialogue_id, []).append(answer)
        return answer


def turn_of(request: GenerationRequest) -> int:
    """1 for the first: what comes after it begins with the environment's answer to an action."""
    return 1 if "room" in read(request) else 2


def read(request: GenerationRequest) -> str:
    """What the policy reads before a turn."""
    return TOKENIZER.decode(request.prompt_ids.tolist(), skip_special_tokens=True)


class World:
    """One shell with a player of trajectories, and what is around it."""

    def __init__(self, shell: LocalShell, player: TrajectoryPlayer, engine: Any, host: Host) -> None:
        self.shell, self.player, self.engine, self.host = shell, player, engine, host
        self.step = 0

    @property
    def records(self) -> list[GroupRecord]:
        return self.shell.journal.records  # type: ignore[attr-defined, no-any-return]

    async def batch(self, groups: int = 2) -> Batch:
        batch, _ = await self.shell.next_batch(groups)
        self.advance()
        return batch

    def advance(self) -> None:
        self.step += 1
        self.engine.publish({}, self.step)
        self.shell.step_advanced(self.step)

    def check_nothing_is_left(self) -> None:
        everything_left(self.shell)
        assert not self.player.pending()
        assert not self.player.in_flight()
        seats = self.player.table.seats
        assert seats.taken == seats.waiting == 0
        assert seats.idle_share == 0
        assert self.engine.metrics()["engine/dialogues"] == 0
        if isinstance(self.engine, NullEngine):
            assert self.engine.open_requests == 0
        runners = self.host.runners if isinstance(self.host, DelayedHost) else self.host._runners
        assert all(runner.running is None for runner in runners)
        assert len(runners) <= seats.count
        shares = [value for name, value in self.player.metrics().items() if name.startswith("rollout/time_share/")]
        assert not shares or abs(sum(shares) - 1) < 1e-9


class KeepsAll(Filter[GroupRewards]):
    """Keeps what the filters of the project call incomplete or truncated as well, as a class of the user's own may."""

    name = "keeps_all"

    def judge(self, item: GroupRewards, /) -> Verdict:
        return self.keep()


@asynccontextmanager
async def world(
    make: Callable[[], Any] | None = ScriptedEnvironment,
    engine: Engine | None = None,
    settings: AgenticConfig | None = None,
    *,
    host: DelayedHost | None = None,
    tokenizer: Any = TOKENIZER,
    gate: MachineGate | None = None,
    **machine: Any,
) -> AsyncIterator[World]:
    """make: builds an environment; None: the configuration names it. Every group is kept. What is left at the end is checked."""
    settings = config() if settings is None else settings
    manager = settings.train_env_manager
    engine = SayingEngine() if engine is None else engine
    machine_config = SchedulerConfig(
        **{
            "group_size": manager.group_size,
            "redundancy": manager.group_size_redundancy,
            "on_weight_update": settings.on_weight_update,
            "on_member_failure": settings.on_member_failure,
            **machine,
        }
    )
    filters = {settings.domain: DomainFilters(query=KeepsAll(context=None), response=None)}  # type: ignore[arg-type]
    around: AbstractAsyncContextManager[Host] = host or EnvironmentHost(settings.environment, settings.env_monitor, build=make)
    async with around as opened:
        player = TrajectoryPlayer(
            settings, host=opened, engine=engine, dialogue=build_dialogue_format(settings.dialogue, tokenizer), seed=settings.seed
        )
        shell = LocalShell(
            scheduler=Scheduler(machine_config, filters, gate=gate),
            source=EpisodeTasks(settings.domain, manager.num_env_groups, seed=settings.seed),
            engine=engine,
            journal=ListJournal(),
            player=player,
        )
        out = World(shell, player, engine, opened)
        try:
            yield out
        finally:
            await shell.close()
        out.check_nothing_is_left()


def rollouts(batch: Batch) -> list[Rollout]:
    """All members of a batch."""
    return [rollout for group in batch.groups for rollout in group.rollouts]
