"""GroupQueue: groups of trajectories for whoever brings environment managers of their own. A plain face on the machine, which decides.

An environment group opens one episode after another; `group_size` members of an episode make a group. The environments of an environment
group ask which episode to play (`get_episode_id`), play it, and put what came of it (`put`), one put for each answer; the trainer takes
batches (`get_batch`) and says when it has stepped (`advance_step`). Nothing here waits: who gets None asks again when `on_work` is called.

The invariant: every environment group has as many episodes that are open, kept or trained as any other, up to one. The episode of a group
that left untrained, for whatever reason, is followed by a new one of the same environment group, at the end of its queue, open to all of
its environments at once. An episode has one life: what comes for one that is over is counted (`scheduler/late_results`) and ignored.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

import numpy as np

from sluice.config import EnvManagerConfig, FilterConfig
from sluice.errors import ConfigError, QueueError, RecordError, ResampleError
from sluice.filters import DomainFilters, FilterContext, QueryFilter, RatioGuard, build_group_filter, filters_state, load_filters_state
from sluice.filters.base import Filter, RewardFilter
from sluice.filters.build import GROUP_CATEGORY
from sluice.filters.custom import Custom
from sluice.filters.whole_group import WholeGroup
from sluice.scheduler import events as ev
from sluice.scheduler.machine import Scheduler
from sluice.scheduler.settings import SchedulerConfig
from sluice.types import Batch, Failure, Group, Rollout, Task, TokenIds

Member: TypeAlias = Any
"""What a member of a group is to whoever puts it: a `Rollout`, a mapping with "reward", or any object, with `reward_of`."""


class Judge(Protocol):
    """An object that judges whole groups."""

    def judge(self, group: Group, /) -> object:
        """True keeps; or a whole `Verdict`."""


GroupFilter: TypeAlias = QueryFilter | Mapping[str, Any] | Judge | Callable[[list[Member]], object]
"""A filter of this project or its configuration, an object with `.judge`, or a function of the members; True keeps."""

_DOMAIN: Final = "episodes"  # there is one kind of group here; the name stands in messages
_STATE_VERSION: Final = 1
_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int64)
_LOST: Final = Failure(cause="infrastructure", reason="member_failed", detail="its environment put None")


class _Episode:
    """One group instance of an environment group, from its launch until it leaves."""

    __slots__ = ("came", "delivered", "env_group", "episode_id", "free", "group_id", "members", "players", "start_step", "taken")

    def __init__(self, *, group_id: int, env_group: int, episode_id: int, start_step: int) -> None:
        self.group_id = group_id  # the machine's
        self.env_group = env_group
        self.episode_id = episode_id
        self.start_step = start_step
        self.free: deque[ev.LaunchMember] = deque()  # members that nobody plays yet
        self.taken: deque[ev.LaunchMember] = deque()  # members that some environment plays
        self.players: set[int] = set()  # environments that were given a member and have not asked again
        self.came = 0  # puts that are not known to be of one of these: a put does not say whose it is
        self.members: dict[int, Member] = {}  # attempt_id -> what was put, where it is no Rollout
        self.delivered: frozenset[int] = frozenset()  # attempt_ids of those in the batch that it is part of

    @property
    def is_wanted(self) -> bool:
        """Whether a further member may still count."""
        return bool(self.free or self.taken)


class GroupQueue:
    """Groups of trajectories: episodes out, members in, batches of whole and judged groups out. One thread or one loop at a time.

    Raises `ConfigError` for settings that cannot be. What breaks the queue for good (a group filter that raises, a batch that cannot be
    filled within its bounds) is raised where it happens and by every `get_batch` from then on; environments get no more work then.
    """

    def __init__(
        self,
        num_env_groups: int,
        group_size: int,
        group_size_redundancy: int = 0,
        *,
        rollout_batch_size: int,
        max_traj_per_env: int = -1,
        group_filter: GroupFilter | None = None,
        async_generation_ratio: float = 0.0,
        guard: RatioGuard | None = None,
        seed: int = 0,
        max_resample_rounds: int = 10,
        max_response_rounds: int = 5,
        max_staleness: int | None = None,
        on_exhausted: Literal["raise", "shrink"] = "raise",
        reward_of: Callable[[Member], float | None] | None = None,
        on_work: Callable[[], None] | None = None,
        on_batch: Callable[[], None] | None = None,
        on_left: Callable[[ev.GroupRecord], None] | None = None,
        release: Callable[[Member], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`rollout_batch_size` is in trajectories, a multiple of `group_size`; `max_traj_per_env` is the number of episodes that each
        environment group may have open for a step: more than the batch needs make room for groups launched ahead of expected drops.

        group_filter: a function gets the list of the members as they were put; an object with `.judge`, and a filter of this project, get
            the `Group`; None keeps every whole group. A plain False is a drop as `invalid`; say more with a `Verdict`.
        seed: the base seed of the environments. Nothing is drawn at random here; a resumed queue must have the same.
        reward_of: reads the reward of what was put; None: a Rollout's own, or the value of "reward" in a mapping.
        on_work: called when members can be played that could not before, at the end of the call that made them.
        on_batch: called when `get_batch` has an answer: a batch, or an error.
        on_left: called with the record of every group that leaves. on_warning: with what a person should know.
        release: called once with every member, other than a Rollout, that was taken and that no batch will have: it came too late, or its
            group left untrained, whatever the reason. For members that hold data elsewhere. A put that raises `QueueError` took nothing.
        clock: seconds, for the records; None: time stands still.
        """
        groups = _check(num_env_groups, group_size, rollout_batch_size, max_traj_per_env)
        self.num_env_groups: Final = num_env_groups
        self.group_size: Final = group_size
        self.envs_per_group: Final = group_size + group_size_redundancy
        self.groups_per_batch: Final = groups
        self.seed: Final = seed
        ahead = 0 if max_traj_per_env == -1 else num_env_groups * max_traj_per_env - groups
        try:
            config = SchedulerConfig(
                group_size=group_size,
                seed=seed,
                redundancy=group_size_redundancy,
                max_resample_rounds=max_resample_rounds,
                max_response_rounds=max_response_rounds,
                on_exhausted=on_exhausted,
                on_member_failure="judge",  # what was put counts; a member that never came is replaced all the same
                max_additional_running_prompts=ahead,
                async_generation_ratio=async_generation_ratio,
                max_staleness=max_staleness,
                requeue=False,  # an episode has one life
            )
            self._filters = {_DOMAIN: DomainFilters(query=self._build_filter(group_filter), response=None)}
            self._machine = Scheduler(config, self._filters, guard=guard)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._reward_of = reward_of
        self._on_work, self._on_batch, self._on_left, self._on_warning = on_work, on_batch, on_left, on_warning
        self._release = release
        self._clock = clock
        self._next_episode = [0] * num_env_groups
        self._turn = 0  # the environment group that opens the next new episode
        self._owed: deque[int] = deque()  # environment groups of which an episode left untrained: they come first
        self._open: list[OrderedDict[int, _Episode]] = [OrderedDict() for _ in range(num_env_groups)]  # by episode_id, oldest first
        self._launched: dict[int, _Episode] = {}  # by the machine's group_id; those of a delivered batch included
        self._pending: dict[int, _Episode] = {}  # by attempt_id: members that may still come
        self._ready: list[list[Member]] | None = None  # groups of the batch that nobody has taken yet; None: it is not full
        self._batch_metrics: dict[str, float] = {"scheduler/group_filter_count": 0.0, "scheduler/off_policy_ratio": 0.0}
        self._late = 0
        self._begun = False
        self._closed = False
        self._error: Exception | None = None
        self._has_work = self._has_batch = False  # and nobody has been told yet

    # ------------------------------------------------------------ what environments call

    def get_episode_id(self, group_id: int, env_id: int) -> int | None:
        """Which episode this environment plays next: the oldest of its group that needs a member. None: nothing to do now.

        An environment that asks again without having put gets the same episode again, while that is wanted: it has begun anew.
        """
        self._check_env(group_id, env_id)
        self._begin()
        found = None
        if self._error is None:
            found = self._given_before(group_id, env_id) or self._give(group_id, env_id)
        self._tell_others()
        return None if found is None else found.episode_id

    def start_step(self, group_id: int, episode_id: int) -> int:
        """The step that a member of this episode must report. Raises `QueueError` when the episode is over, or was never opened."""
        episode = self._find(group_id, episode_id)
        if episode is None:
            raise QueueError(f"episode {episode_id} of environment group {group_id} is over - ask get_episode_id for another one")
        return episode.start_step

    def is_wanted(self, group_id: int, episode_id: int) -> bool:
        """Whether a further member of this episode may still count: where not, whoever plays one may stop."""
        episode = self._find(group_id, episode_id)
        return episode is not None and episode.is_wanted and self._error is None

    def put(self, group_id: int, episode_id: int, start_step: int, member: Member | None) -> bool:
        """A member of an episode came to its end. None: it failed, and is replaced in the same episode.

        False: nobody waits for it any more; it is counted and ignored. Raises `QueueError` for an episode that was never opened, for
        another start step than the episode's, and for a member without a reward that can be read; `FilterError` when the group filter
        breaks on the group that this member makes whole.
        """
        episode = self._find(group_id, episode_id)
        if episode is not None and start_step != episode.start_step:
            raise QueueError(
                f"episode {episode_id} of environment group {group_id} started in step {episode.start_step}, but a member came with "
                f"start_step {start_step} - put what start_step({group_id}, {episode_id}) says"
            )
        rewarded = None if member is None else self._read_reward(member)
        if episode is None or not episode.is_wanted or self._error is not None:
            self._late += 1
            self._let_go([member])
            return False
        if episode.taken:
            launch = episode.taken.popleft()
            episode.came += 1
        else:
            launch = episode.free.popleft()
        del self._pending[launch.attempt_id]
        if member is None:
            self._tell(ev.MemberFailed(attempt_id=launch.attempt_id, failure=_LOST, sampled_tokens=0))
        else:
            self._tell(ev.MemberFinished(rollout=self._as_rollout(episode, launch, member, rewarded)))
        self._tell_others()
        return True

    # ------------------------------------------------------------ what the trainer calls

    @property
    def step(self) -> int:
        """The step whose batch is filled or trained."""
        return self._machine.step

    def get_batch(self, n_groups: int | None = None) -> list[list[Member]] | None:
        """The groups of this step's batch, oldest first, each of `group_size` members; None while the batch is not full.

        n_groups: only so many of them; the next call gives the rest. A member that was put as a `Rollout` comes back as one, with the ids
        of its place; any other comes back as it is. Raises `ResampleError` when the batch cannot be filled within its bounds, and whatever
        else has broken the queue.
        """
        if n_groups is not None and not 1 <= n_groups <= self.groups_per_batch:
            raise QueueError(f"a batch has {self.groups_per_batch} groups, got n_groups {n_groups} - ask for 1 to all of them")
        self._begin()
        self._tell_others()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise QueueError("the queue is closed: no further batch will come")
        if self._ready is None:
            return None
        if not self._ready:
            raise QueueError(f"the batch of step {self.step} has been taken - tell advance_step when it has been trained")
        count = len(self._ready) if n_groups is None else n_groups
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def advance_step(self, step: int) -> None:
        """The batch has been trained, and the run is at `step`: the next batch is opened. The step that it is at already changes nothing.

        Raises `QueueError` for a step back, and before the whole batch of the current step has been taken.
        """
        if self._error is not None:
            raise self._error
        if self._closed:
            raise QueueError("the queue is closed: no further step can be made")
        if step < self.step:
            raise QueueError(f"steps only go forward: the queue is at step {self.step}, got {step}")
        if step > self.step:
            if self._begun and self._ready != []:
                missing = "is not full yet" if self._ready is None else f"has {len(self._ready)} groups that were not taken"
                raise QueueError(f"advance_step({step}), but the batch of step {self.step} {missing} - call get_batch first")
            self._tell(ev.StepAdvanced(step=step))
            self._begun = False
            self._ready = None
        self._begin()
        self._tell_others()

    def close(self) -> None:
        """The run ends: no episode is wanted any more, every group leaves and is recorded. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._tell(ev.Shutdown())
            finally:  # also of a machine that is broken
                untaken = [member for group in self._ready or () for member in group]
                self._ready = None
                self._let_go([*untaken, *(member for episode in self._launched.values() for member in episode.members.values())])
                for episode in self._launched.values():
                    episode.members.clear()

    def metrics(self) -> dict[str, float]:
        """Counts and rates since the start, and those of the filling of the last batch (`scheduler/group_filter_count`, ...)."""
        out = self._machine.metrics() | self._batch_metrics
        out["scheduler/late_results"] += self._late
        return out

    def waiting_for(self) -> str:
        """What the batch waits for, in words; "" when it is full."""
        return self._machine.waiting_for(self._now())

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a later process needs to go on: plain data and numpy arrays, and members that are no `Rollout` as they were put.

        Kept groups come back whole; so do those of a batch that was taken and not stepped on. Episodes that are being played do not: their
        environment groups open new ones first.
        """
        machine = self._machine.state_dict(now=self._now())
        kept = {int(entry["group_id"]) for entry in machine["committed"]}
        episodes = [episode for episode in self._launched.values() if episode.group_id in kept]
        interrupted = [episode.env_group for episode in self._launched.values() if episode.group_id not in kept]
        return {
            "version": _STATE_VERSION,
            "num_env_groups": self.num_env_groups,
            "next_episode": list(self._next_episode),
            "turn": self._turn,
            "owed": [*self._owed, *interrupted],
            "late": self._late,
            "kept": [[one.group_id, one.env_group, one.episode_id, one.start_step, list(one.members.items())] for one in episodes],
            "filters": filters_state(self._filters),
            "machine": machine,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In a queue that nobody has asked for anything yet: go on where `state` was saved. Raises `RecordError` if it does not fit."""
        if self._begun or self._launched or self.step:
            raise RecordError("expected a fresh queue to load a state into, got one that has begun - make a new one")
        try:
            for key, expected in (("version", _STATE_VERSION), ("num_env_groups", self.num_env_groups)):
                if state[key] != expected:
                    advice = "resume with the settings of the saved run"
                    raise RecordError(f"the saved state of the queue does not fit: {key} must be {expected}, got {state[key]} - {advice}")
            next_episode = [int(number) for number in state["next_episode"]]
            owed = deque(int(env_group) for env_group in state["owed"])
            turn, late = int(state["turn"]), int(state["late"])
            episodes = []
            for group_id, env_group, episode_id, start_step, members in state["kept"]:
                episode = _Episode(group_id=group_id, env_group=env_group, episode_id=episode_id, start_step=start_step)
                episode.members = {int(attempt_id): member for attempt_id, member in members}
                episodes.append(episode)
            machine, filters = state["machine"], state["filters"]
        except (LookupError, TypeError, ValueError) as error:
            raise RecordError(f"the saved state of the queue is torn or not ours: {type(error).__name__}: {error}") from error
        if len(next_episode) != self.num_env_groups or not {turn, *owed} <= set(range(self.num_env_groups)):
            raise RecordError(f"the saved state of the queue is torn: it must be of {self.num_env_groups} environment groups")
        tasks = {task.task_id: task for task in (_task(one.env_group, one.episode_id) for one in episodes)}
        self._carry_out(self._machine.load_state_dict(machine, tasks))
        self._machine.prompts.back.clear()  # as for a ReturnTask
        load_filters_state(self._filters, filters)
        self._next_episode, self._owed, self._turn, self._late = next_episode, owed, turn, late
        for episode in episodes:
            self._launched[episode.group_id] = episode
            self._open[episode.env_group][episode.episode_id] = episode

    # ------------------------------------------------------------ episodes

    def _check_env(self, group_id: int, env_id: int) -> None:
        self._check_group(group_id)
        if not 0 <= env_id < self.envs_per_group:
            raise QueueError(
                f"expected an environment from 0 to {self.envs_per_group - 1} (group_size + group_size_redundancy of them), got {env_id}"
            )

    def _check_group(self, group_id: int) -> None:
        if not 0 <= group_id < self.num_env_groups:
            raise QueueError(f"expected an environment group from 0 to {self.num_env_groups - 1}, got {group_id}")

    def _find(self, group_id: int, episode_id: int) -> _Episode | None:
        """An episode that has not left; None: it is over."""
        self._check_group(group_id)
        if not 0 <= episode_id < self._next_episode[group_id]:
            opened = self._next_episode[group_id]
            what = f"has opened the episodes 0 to {opened - 1}" if opened else "has opened no episode yet"
            raise QueueError(f"environment group {group_id} {what}, got episode {episode_id} - play what get_episode_id says")
        return self._open[group_id].get(episode_id)

    def _given_before(self, group_id: int, env_id: int) -> _Episode | None:
        """The episode that this environment plays, if it asks without having put."""
        for episode in self._open[group_id].values():
            if env_id in episode.players:
                if not episode.came and episode.taken:
                    return episode
                episode.players.discard(env_id)
                episode.came = max(0, episode.came - 1)
        return None

    def _give(self, group_id: int, env_id: int) -> _Episode | None:
        for episode in self._open[group_id].values():
            if episode.free:
                episode.taken.append(episode.free.popleft())
                episode.players.add(env_id)
                return episode
        return None

    def _open_episode(self) -> Task:
        """The task that the machine draws: a new episode, of the environment group that lacks one, else of the one whose turn it is."""
        if self._owed:
            env_group = self._owed.popleft()
        else:
            env_group = self._turn
            self._turn = (env_group + 1) % self.num_env_groups
        episode_id = self._next_episode[env_group]
        self._next_episode[env_group] += 1
        return _task(env_group, episode_id)

    # ------------------------------------------------------------ members

    def _read_reward(self, member: Member) -> float | None:
        if self._reward_of is not None:
            reward = self._reward_of(member)
        elif isinstance(member, Rollout):
            return member.reward
        elif isinstance(member, Mapping) and "reward" in member:
            reward = member["reward"]
        else:
            got = f"a mapping with {sorted(map(str, member))}" if isinstance(member, Mapping) else type(member).__name__
            raise QueueError(f"expected a Rollout, a mapping with 'reward', or None for a failed member, got {got} - or give reward_of")
        if reward is None:
            return None
        try:
            return float(reward)
        except (TypeError, ValueError) as error:
            raise QueueError(f"expected the reward of a member to be a number or None, got {reward!r}: {error}") from error

    def _as_rollout(self, episode: _Episode, launch: ev.LaunchMember, member: Member, reward: float | None) -> Rollout:
        """The member as the machine knows it."""
        attempt_id, group_id, member_index, task_id = launch.attempt_id, launch.group_id, launch.member_index, launch.task.task_id
        failure = None if reward is not None else Failure(cause="infrastructure", reason="reward_missing")
        if isinstance(member, Rollout):
            return replace(
                member,
                attempt_id=attempt_id,
                group_id=group_id,
                member_index=member_index,
                task_id=task_id,
                reward=reward,
                failure=member.failure or failure,
            )
        episode.members[attempt_id] = member
        return Rollout(
            attempt_id=attempt_id,
            group_id=group_id,
            member_index=member_index,
            task_id=task_id,
            turns=(),
            finish_reason="completed",
            reward=reward,
            failure=failure,
        )

    def members_of(self, group: Group) -> list[Member]:
        """The members of a group that is being judged, as they were put: for a filter that looks at them."""
        members = self._launched[group.group_id].members
        return [members.get(rollout.attempt_id, rollout) for rollout in group.rollouts]

    def _build_filter(self, given: GroupFilter | None) -> QueryFilter:
        """The filter that the machine asks."""
        where = "group_filter"
        if given is None or isinstance(given, Mapping):
            config = None if given is None else FilterConfig.model_validate(given)
            return build_group_filter(
                EnvManagerConfig(group_size=self.group_size, group_filter_config=config), mode="train", where="GroupQueue", min_members=None
            )
        context = FilterContext(where=where, group_size=self.group_size, group_size_key="group_size")
        if isinstance(given, Filter):
            own = cast("QueryFilter", given)
            return own if isinstance(own, RewardFilter) else WholeGroup(context=context, filter=own)
        name = getattr(given, "__name__", type(given).__name__)
        if inspect.isclass(given):
            raise ConfigError(f"{where} must be an object, got the class {name} - build it: {name}(...)")
        if callable(getattr(given, "filter", None)):
            raise ConfigError(
                f"{where} must have .judge (True keeps), not .filter (True drops), got {name} with .filter - rename and negate it"
            )
        judge: Callable[[Any], object] | None = getattr(given, "judge", None)
        on_members = cast("Callable[[list[Member]], object]", given)
        if not callable(given if judge is None else judge) or inspect.iscoroutinefunction(given if judge is None else judge):
            raise ConfigError(f"{where} must be a plain function of the members, or an object with such a .judge(group), got {given!r}")
        has_memory = all(callable(getattr(given, method, None)) for method in ("state_dict", "load_state_dict"))
        custom: Custom[Any] = Custom(
            context=context,
            path=where if name == "<lambda>" else name,
            function=(lambda group: on_members(self.members_of(group))) if judge is None else judge,
            category=GROUP_CATEGORY,
            memory=cast("Any", given) if has_memory else None,
            sees_all=True,
        )
        return WholeGroup(context=context, filter=custom)

    # ------------------------------------------------------------ the machine

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def _begin(self) -> None:
        """Ask for the batch of this step, once."""
        if not self._begun and not self._closed and self._error is None:
            self._begun = True
            self._tell(ev.BatchWanted(groups=self.groups_per_batch))

    def _tell(self, event: ev.Event) -> None:
        try:
            self._carry_out(self._machine.handle(event, self._now()))
        except Exception as error:
            if self._error is None:
                self._error = error
                self._has_batch = True
            raise

    def _carry_out(self, instructions: Sequence[ev.Instruction]) -> None:
        """Depth first: that a group has left is known before the task of its replacement is drawn."""
        for instruction in instructions:
            match instruction:
                case ev.DrawTask():
                    self._tell(ev.TaskDrawn(task=self._open_episode(), epoch=0))
                case ev.LaunchMember():
                    self._launch(instruction)
                case ev.CancelMember():
                    self._stop(instruction.attempt_id)
                    self._tell(ev.MemberCancelled(attempt_id=instruction.attempt_id, sampled_tokens=0))
                case ev.ReturnTask():  # it is never drawn again: the machine need not remember that it came back
                    self._machine.prompts.back.discard((instruction.task.task_id, instruction.epoch))
                case ev.RecordGroup():
                    self._leave(instruction.record)
                case ev.DeliverBatch():
                    self._deliver(instruction.batch, instruction.metrics)
                case ev.Fail():
                    self._error = ResampleError(instruction.message)
                    self._has_batch = True
                case ev.Warn():
                    if self._on_warning is not None:
                        self._on_warning(instruction.message)
                case _:
                    raise AssertionError(f"the machine says something to a queue that it has no word for: {instruction!r}")

    def _launch(self, launch: ev.LaunchMember) -> None:
        episode = self._launched.get(launch.group_id)
        if episode is None:
            env_group, episode_id = launch.task.entry["env_group"], launch.task.entry["episode"]
            episode = _Episode(group_id=launch.group_id, env_group=env_group, episode_id=episode_id, start_step=self._machine.step)
            self._launched[launch.group_id] = episode
            self._open[env_group][episode_id] = episode
        episode.free.append(launch)
        self._pending[launch.attempt_id] = episode
        self._has_work = True

    def _stop(self, attempt_id: int) -> None:
        """A member is not wanted any more, whether or not somebody plays it."""
        episode = self._pending.pop(attempt_id)
        for launches in (episode.free, episode.taken):
            for launch in launches:
                if launch.attempt_id == attempt_id:
                    launches.remove(launch)
                    return

    def _leave(self, record: ev.GroupRecord) -> None:
        episode = self._launched.pop(record.group_id, None)
        if episode is not None:  # None: of an earlier process
            del self._open[episode.env_group][episode.episode_id]
            if record.outcome != "trained":
                self._owed.append(episode.env_group)
            self._let_go([member for attempt_id, member in episode.members.items() if attempt_id not in episode.delivered])
        if self._on_left is not None:
            self._on_left(record)

    def _deliver(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        self._ready = [self.members_of(group) for group in batch.groups]
        for group in batch.groups:
            self._launched[group.group_id].delivered = frozenset(rollout.attempt_id for rollout in group.rollouts)
        self._batch_metrics = dict(metrics)
        self._has_batch = True

    def _let_go(self, members: Iterable[Member | None]) -> None:
        """No batch will have these."""
        if self._release is not None:
            for member in members:
                if member is not None and not isinstance(member, Rollout):
                    self._release(member)

    def _tell_others(self) -> None:
        """The end of a call: whoever waits may ask again. Last of all, so that they may do it from within."""
        has_work, has_batch = self._has_work and self._error is None, self._has_batch
        self._has_work = self._has_batch = False
        if has_work and self._on_work is not None:
            self._on_work()
        if has_batch and self._on_batch is not None:
            self._on_batch()


def _task(env_group: int, episode_id: int) -> Task:
    entry = {"env_group": env_group, "episode": episode_id}
    return Task(task_id=f"g{env_group}/e{episode_id}", domain=_DOMAIN, prompt="", prompt_ids=_NO_TOKENS, entry=entry)


def _check(num_env_groups: int, group_size: int, rollout_batch_size: int, max_traj_per_env: int) -> int:
    """Groups of one batch. Raises `ConfigError`."""
    for name, value in (("num_env_groups", num_env_groups), ("group_size", group_size), ("rollout_batch_size", rollout_batch_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if rollout_batch_size % group_size:
        raise ConfigError(
            f"rollout_batch_size is in trajectories, and must be a multiple of group_size ({group_size}), got {rollout_batch_size} - "
            f"{-(-rollout_batch_size // group_size) * group_size} is the next one"
        )
    groups = rollout_batch_size // group_size
    fewest = -(-groups // num_env_groups)
    if max_traj_per_env != -1 and max_traj_per_env < fewest:
        raise ConfigError(
            f"max_traj_per_env must be -1 or at least {fewest}, so that {num_env_groups} environment groups can open the {groups} of a "
            f"batch, got {max_traj_per_env} - raise it, or num_env_groups"
        )
    return groups
