"""The queue for environment managers of one's own: what it hands out, takes, and makes of it. Properties first, then examples."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.errors import ConfigError, FilterError, QueueError, RecordError, ResampleError
from sluice.filters import RatioGuard, build_query_filter
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import GroupQueue, GroupRecord
from sluice.types import Group, Rollout, Verdict
from tests.fakes import make_rollout

Members = list[dict[str, Any]]


def spread(members: Members) -> bool:
    return len({member["reward"] for member in members}) > 1


def make_queue(groups: int = 2, size: int = 2, redundancy: int = 0, *, batch: int | None = None, **others: Any) -> GroupQueue:
    """A queue whose batch is one group of every environment group, and which keeps groups with spread."""
    others.setdefault("group_filter", spread)
    return GroupQueue(groups, size, redundancy, rollout_batch_size=groups * size if batch is None else batch * size, **others)


def play(queue: GroupQueue, group: int, episode: int, *rewards: float | None) -> list[bool]:
    """Put members with these rewards; None: a member that failed."""
    step = queue.start_step(group, episode)
    return [queue.put(group, episode, step, None if reward is None else {"reward": reward, "of": (group, episode)}) for reward in rewards]


def of(batch: list[Members] | None) -> list[tuple[int, int]]:
    """(environment group, episode) of each group of a batch."""
    assert batch is not None
    for members in batch:
        assert len({member["of"] for member in members}) == 1
    return [members[0]["of"] for members in batch]


def offers(queue: GroupQueue, group: int) -> list[int | None]:
    """What every environment of a group is told to play."""
    return [queue.get_episode_id(group, env) for env in range(queue.envs_per_group)]


def fill(queue: GroupQueue) -> list[Members]:
    """All environments play well until the batch is there: if it never is, the queue has locked up."""
    for _ in range(100):
        batch = queue.get_batch()
        if batch is not None:
            return batch
        for group in range(queue.num_env_groups):
            for env in range(queue.envs_per_group):
                episode = queue.get_episode_id(group, env)
                if episode is not None:
                    play(queue, group, episode, float(env % 2))
    raise AssertionError(f"the batch is not full, and waits for: {queue.waiting_for()!r}")


# ---------------------------------------------------------------- any calls in any order


class Runs(RuleBasedStateMachine):
    """Environments that play, fail, begin anew, come late or twice, in any order; a trainer; kills and resumes."""

    queue: GroupQueue

    @initialize(
        groups=st.integers(1, 4),
        size=st.integers(1, 3),
        redundancy=st.integers(0, 2),
        per_batch=st.integers(1, 5),
        room=st.integers(-1, 2),
        ratio=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5, 2.0]),
        rounds=st.sampled_from([2, 4, 1000]),
        tries=st.integers(1, 3),
        guarded=st.booleans(),
        policy=st.sampled_from(["raise", "shrink"]),
    )
    def begin(self, groups: int, size: int, redundancy: int, per_batch: int, room: int, ratio: float, **others: Any) -> None:
        self.groups, self.size, self.redundancy, self.ratio = groups, size, redundancy, ratio
        fewest = -(-per_batch // groups)
        self.make: Callable[[], GroupQueue] = lambda: GroupQueue(
            groups,
            size,
            redundancy,
            rollout_batch_size=per_batch * size,
            max_traj_per_env=-1 if room < 0 else fewest + room,
            group_filter=self.judge,
            async_generation_ratio=ratio,
            guard=RatioGuard(0.6) if others["guarded"] else None,
            max_resample_rounds=others["rounds"],
            max_response_rounds=others["tries"],
            on_exhausted=others["policy"],
            on_left=self.records.append,
        )
        self.records: list[GroupRecord] = []
        self.judged: Counter[str] = Counter()
        self.queue = self.make()
        self.playing: dict[tuple[int, int], tuple[int, int]] = {}  # (group, environment) -> (episode, start step)
        self.serial = 0
        self.put_now = Counter[str]()  # by what became of it
        self.taken: list[int] = []  # serial numbers of the members of the batch that is trained
        self.trained: list[int] = []
        self.is_broken = False

    def judge(self, members: Members) -> bool:
        """A group with a success is kept."""
        assert len(members) == self.size
        places = {member["of"] for member in members}
        assert len(places) == 1, "a mixed group"
        assert len({member["serial"] for member in members}) == self.size, "a doubled member"
        self.judged[places.pop()] += 1
        return any(member["reward"] == 1.0 for member in members)

    # ------------------------------------------------------------ environments

    @rule(moves=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["good", "good", "bad", "bad", "failed"])), min_size=5, max_size=40))
    def work(self, moves: list[tuple[int, str]]) -> None:
        """Environments ask when they are idle and put when they are not."""
        every = [(group, env) for group in range(self.groups) for env in range(self.size + self.redundancy)]
        for number, how in moves:
            place = every[number % len(every)]
            if place in self.playing:
                self.deliver(place[0], *self.playing.pop(place), how)
            else:
                self.ask(place)

    def ask(self, place: tuple[int, int]) -> None:
        episode = self.queue.get_episode_id(*place)
        if episode is not None:
            self.playing[place] = (episode, self.queue.start_step(place[0], episode))
            assert self.queue.is_wanted(place[0], episode)

    @precondition(lambda self: self.playing)
    @rule(data=st.data())
    def begin_anew(self, data: st.DataObject) -> None:
        """An environment restarts: it asks again without having put."""
        place = data.draw(st.sampled_from(sorted(self.playing)))
        del self.playing[place]
        self.ask(place)

    @precondition(lambda self: self.put_now["taken"])
    @rule(data=st.data())
    def put_twice(self, data: st.DataObject) -> None:
        """Something comes for an episode of any age, from nobody who was asked for it."""
        group = data.draw(st.integers(0, self.groups - 1))
        opened = self.queue._next_episode[group]
        if opened:
            episode = data.draw(st.integers(0, opened - 1))
            alive = self.queue._open[group].get(episode)
            self.deliver(group, episode, 0 if alive is None else alive.start_step, "bad")

    def deliver(self, group: int, episode: int, start_step: int, how: str) -> None:
        wanted = self.queue.is_wanted(group, episode)
        member = None if how == "failed" else {"reward": float(how == "good"), "of": f"{group}/{episode}", "serial": self.serial}
        self.serial += 1
        counted = self.queue.put(group, episode, start_step, member)
        assert counted == wanted
        self.put_now["late" if not counted else "failed" if member is None else "taken"] += 1

    # ------------------------------------------------------------ the trainer

    @rule()
    def train(self) -> None:
        """Batches are filled and trained until one is not full by itself."""
        for _ in range(3):
            if self.is_broken or self.queue._ready is None:
                return
            while self.queue._ready:
                batch = self.queue.get_batch()
                assert batch is not None
                self.check_batch(batch)
            self.step(1)

    @rule(data=st.data(), in_pieces=st.booleans())
    def take(self, data: st.DataObject, in_pieces: bool) -> None:
        if self.queue._ready == []:
            return
        try:
            batch = self.queue.get_batch(data.draw(st.integers(1, self.queue.groups_per_batch)) if in_pieces else None)
        except ResampleError:
            self.is_broken = True
            return
        if batch is not None:
            self.check_batch(batch)

    @precondition(lambda self: self.queue._ready == [] and not self.is_broken)
    @rule(by=st.sampled_from([1, 1, 1, 2]))
    def step(self, by: int) -> None:
        self.trained += self.taken
        self.taken = []
        self.queue.advance_step(self.queue.step + by)

    def check_batch(self, batch: list[Members]) -> None:
        assert batch
        for members in batch:
            assert len(members) == self.size, "a partial group"
            assert len({member["of"] for member in members}) == 1, "a mixed group"
            self.taken += [member["serial"] for member in members]
        assert len(set(self.taken)) == len(self.taken), "a doubled member"
        assert not set(self.taken) & set(self.trained), "a member of an earlier batch"
        starts = [self.queue.start_step(*map(int, members[0]["of"].split("/"))) for members in batch]
        assert starts == sorted(starts), "not oldest first"
        assert all(self.queue.step - start <= math.ceil(self.ratio) for start in starts), "too old"

    # ------------------------------------------------------------ a kill

    @precondition(lambda self: not self.is_broken)
    @rule(spared=st.integers(0, 5))
    def resume(self, spared: int) -> None:
        """The process dies and goes on: environments begin anew, and a batch that was not stepped on is taken again."""
        if spared:
            return
        saved = decode(encode(self.queue.state_dict()))
        before = self.queue._machine.ledger
        self.queue = self.make()
        self.queue.load_state_dict(saved)
        after = self.queue._machine.ledger
        assert after.attempts_launched == before.attempts_launched
        assert len(self.records) == before.groups_launched - self.queue._machine.open_groups
        self.playing.clear()
        self.taken = []

    # ------------------------------------------------------------ what must hold after every call

    @invariant()
    def every_put_is_counted_once(self) -> None:
        if hasattr(self, "queue"):
            ledger = self.queue._machine.ledger
            assert self.queue.metrics()["scheduler/late_results"] == self.put_now["late"]
            assert ledger.attempts["failed"] == self.put_now["failed"]
            whole = sum(ledger.attempts[name] for name in ("trained", "dropped", "rejected", "expired", "surplus", "discarded"))
            assert whole + ledger.open_attempts == self.put_now["taken"]
            assert ledger.attempts_launched == sum(ledger.attempts.values()) + ledger.open_attempts + len(self.queue._pending)

    @invariant()
    def every_episode_is_judged_once(self) -> None:
        if hasattr(self, "queue"):
            assert max(self.judged.values(), default=1) == 1
            assert max(Counter(record.task_id for record in self.records).values(), default=1) == 1

    @invariant()
    def no_episode_has_more_members_than_may_run(self) -> None:
        if hasattr(self, "queue"):
            running = Counter((group, episode) for (group, _), (episode, _) in self.playing.items() if self.queue.is_wanted(group, episode))
            assert max(running.values(), default=0) <= self.size + self.redundancy

    @invariant()
    def environment_groups_are_served_alike(self) -> None:
        """Open, kept and trained episodes, and those still to be opened for one that left, are the same for all, up to one."""
        if hasattr(self, "queue"):
            gone = Counter(int(record.task_id[1 : record.task_id.index("/")]) for record in self.records if record.outcome != "trained")
            owed = Counter(self.queue._owed)
            counts = [opened - gone[group] + owed[group] for group, opened in enumerate(self.queue._next_episode)]
            assert max(counts) - min(counts) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        if not self.is_broken:
            self.no_deadlock()
        self.queue.close()
        machine = self.queue._machine
        assert not self.queue._launched
        assert not self.queue._pending
        assert machine.open_groups == machine.running_attempts == 0
        assert len(self.records) == machine.ledger.groups_launched
        assert not machine.prompts.back, "memory that grows with the run"
        assert self.queue.metrics()["scheduler/requeued_prompts"] == 0  # an episode has one life

    def no_deadlock(self) -> None:
        """From wherever it stands, environments that play well fill the batch: whoever plays puts first, then all go on."""
        for (group, _), (episode, start_step) in self.playing.items():
            self.deliver(group, episode, start_step, "good")
        self.playing.clear()
        if self.queue._ready == []:
            self.step(1)
        for _ in range(300):
            try:
                batch = self.queue.get_batch()
            except ResampleError:
                return  # a bound: what was rejected before has used the rounds up
            if batch is not None:
                self.check_batch(batch)
                return
            for group in range(self.groups):
                for env in range(self.size + self.redundancy):
                    episode = self.queue.get_episode_id(group, env)
                    if episode is not None:
                        self.deliver(group, episode, self.queue.start_step(group, episode), "good")
        raise AssertionError(f"the batch is not full, and waits for: {self.queue.waiting_for()!r}")


TestRuns = Runs.TestCase
TestRuns.settings = settings(stateful_step_count=30)


# ---------------------------------------------------------------- the way of a group


def test_a_batch_is_full_when_its_groups_are_whole_and_kept():
    queue = make_queue(2, 2)
    assert [offers(queue, group) for group in range(2)] == [[0, 0], [0, 0]]
    for group in (1, 0):
        assert queue.get_batch() is None
        assert play(queue, group, 0, 0.0, 1.0) == [True, True]
    assert of(queue.get_batch()) == [(0, 0), (1, 0)]  # in the order of their launch, not of their end


def test_the_first_g_of_g_and_r_are_judged_once_and_the_others_are_no_longer_wanted():
    asked: list[Members] = []
    queue = make_queue(1, 2, 2, group_filter=lambda members: not asked.append(members))
    assert offers(queue, 0) == [0, 0, 0, 0]
    assert queue.is_wanted(0, 0)
    assert play(queue, 0, 0, 0.0, 1.0) == [True, True]
    assert not queue.is_wanted(0, 0)
    assert play(queue, 0, 0, 1.0) == [False]  # redundant, and late
    assert [[member["reward"] for member in members] for members in asked] == [[0.0, 1.0]]
    batch = queue.get_batch()
    assert batch is not None
    assert [len(members) for members in batch] == [2]
    assert queue.metrics()["scheduler/late_results"] == 1
    assert queue.metrics()["ledger/attempts/cancelled"] == 2


@pytest.mark.parametrize("redundancy", [0, 2])
def test_the_episode_after_a_rejected_one_is_open_to_every_environment_of_its_group_at_once(redundancy: int):
    """Elsewhere they were played one after another, by the environment that had delivered the last member of the rejected group."""
    told: list[str] = []
    queue = make_queue(3, 8, redundancy, on_work=lambda: told.append("work"))
    assert offers(queue, 1) == [0] * (8 + redundancy)
    del told[:]
    play(queue, 1, 0, *[0.0] * 8)
    assert told == ["work"]
    assert offers(queue, 1) == [1] * (8 + redundancy)
    assert [queue.get_episode_id(1, env) for env in range(8)] == [1] * 8  # nobody has put: it is still theirs
    assert offers(queue, 0) == [0] * (8 + redundancy)
    assert queue.metrics()["scheduler/rejected/invalid/spread"] == 1


def test_a_member_of_a_rejected_episode_is_ignored_and_counted_whatever_it_says():
    queue = make_queue(2, 2, 1)
    offers(queue, 0)
    play(queue, 0, 0, 1.0, 1.0)
    assert not queue.is_wanted(0, 0)
    assert queue.put(0, 0, 0, {"reward": 5.0}) is False
    assert queue.put(0, 0, 99, None) is False  # nobody remembers when it started
    assert queue.metrics()["scheduler/late_results"] == 2
    assert offers(queue, 0) == [1, 1, 1]
    with pytest.raises(QueueError, match="is over"):
        queue.start_step(0, 0)


def test_a_failed_member_is_replaced_in_the_same_episode():
    told: list[int] = []
    queue = make_queue(1, 2, on_work=lambda: told.append(1))
    assert offers(queue, 0) == [0, 0]
    del told[:]
    assert play(queue, 0, 0, None) == [True]
    assert told == [1]
    assert offers(queue, 0) == [0, 0]
    assert play(queue, 0, 0, 1.0, None, 0.0) == [True, True, True]
    assert of(queue.get_batch()) == [(0, 0)]
    assert queue.metrics()["ledger/rejected_members/member_failed"] == 2


def test_redundant_members_absorb_a_failure_before_one_is_tried_again():
    queue = make_queue(1, 2, 1)
    offers(queue, 0)
    play(queue, 0, 0, None)
    assert queue.get_episode_id(0, 0) is None  # two others play, and two are needed
    play(queue, 0, 0, None)
    assert queue.get_episode_id(0, 0) == 0


def test_an_episode_whose_members_fail_again_and_again_is_given_up_and_the_next_one_opened():
    queue = make_queue(1, 2, max_response_rounds=3)
    offers(queue, 0)
    assert play(queue, 0, 0, *[None] * 6) == [True, True, True, True, True, False]  # both members have three tries
    assert offers(queue, 0) == [1, 1]
    assert queue.metrics()["scheduler/rejected/invalid/response_retries"] == 1


def test_a_group_waits_for_its_own_members_whoever_is_faster():
    """Members of several episodes of one environment group never mix."""
    queue = make_queue(1, 2, batch=2, max_traj_per_env=2)
    assert offers(queue, 0) == [0, 0]
    play(queue, 0, 0, 1.0)
    assert queue.get_episode_id(0, 0) == 1
    play(queue, 0, 1, 0.0)
    assert queue.get_batch() is None
    assert queue.get_episode_id(0, 0) == 1
    play(queue, 0, 1, 1.0)
    play(queue, 0, 0, 0.0)
    batch = queue.get_batch()
    assert of(batch) == [(0, 0), (0, 1)]


def test_one_environment_alone_can_play_a_whole_group():
    queue = make_queue(1, 3, 1)
    for reward in (0.0, 1.0, 0.0):
        episode = queue.get_episode_id(0, 0)
        assert episode == 0
        play(queue, 0, episode, reward)
    assert queue.get_episode_id(0, 0) is None
    assert of(queue.get_batch()) == [(0, 0)]


def test_an_environment_that_begins_anew_keeps_its_member_and_takes_nobody_elses():
    queue = make_queue(1, 3)
    assert queue.get_episode_id(0, 0) == 0
    for _ in range(5):
        assert queue.get_episode_id(0, 0) == 0
    assert [queue.get_episode_id(0, env) for env in (1, 2)] == [0, 0]
    play(queue, 0, 0, 0.0, 1.0)  # of two of them, nobody says which
    assert [queue.get_episode_id(0, env) for env in (2, 0)] == [None, None]
    assert queue.get_episode_id(0, 1) == 0
    play(queue, 0, 0, 0.0)
    assert of(queue.get_batch()) == [(0, 0)]


def test_replacements_go_to_the_environment_group_that_lost_and_new_episodes_to_all_in_turn():
    queue = make_queue(3, 2, batch=2)
    assert [offers(queue, group) for group in range(3)] == [[0, 0], [0, 0], [None, None]]
    play(queue, 1, 0, 0.0, 0.0)
    assert [queue.get_episode_id(group, 0) for group in range(3)] == [0, 1, None]
    play(queue, 1, 1, 0.0, 1.0)
    play(queue, 0, 0, 0.0, 1.0)
    assert of(queue.get_batch()) == [(0, 0), (1, 1)]
    queue.advance_step(1)
    assert [queue.get_episode_id(group, 0) for group in range(3)] == [1, None, 0]  # group 2's turn, then group 0's


def test_environment_groups_train_equally_often_however_often_one_of_them_is_dropped():
    queue = make_queue(4, 2, batch=3, max_resample_rounds=50)
    trained: Counter[int] = Counter()
    for step in range(8):
        while (batch := queue.get_batch()) is None:
            for group in range(4):
                while (episode := queue.get_episode_id(group, 0)) is not None:
                    is_dropped = group == 2 and episode % 4 != 3
                    play(queue, group, episode, 0.0, 0.0 if is_dropped else 1.0)
        trained.update(group for group, _ in of(batch))
        queue.advance_step(step + 1)
    assert trained == dict.fromkeys(range(4), 6)


# ---------------------------------------------------------------- steps


def test_groups_start_ahead_as_far_as_the_ratio_says():
    for ratio, open_ahead in ((0.0, 0), (0.5, 1), (1.0, 2), (2.0, 4)):
        queue = make_queue(8, 1, batch=2, async_generation_ratio=ratio, group_filter=None)
        assert [queue.get_episode_id(group, 0) for group in range(8)] == [0] * (2 + open_ahead) + [None] * (6 - open_ahead), ratio


def test_what_was_started_ahead_is_trained_in_a_later_step_and_its_age_is_told():
    queue = make_queue(4, 1, batch=2, async_generation_ratio=1.0, group_filter=None)
    for group in range(4):
        queue.get_episode_id(group, 0)
        play(queue, group, 0, 1.0)
    assert of(queue.get_batch()) == [(0, 0), (1, 0)]
    assert queue.metrics()["scheduler/off_policy_ratio"] == 0
    queue.advance_step(1)
    assert of(queue.get_batch()) == [(2, 0), (3, 0)]
    assert queue.metrics()["scheduler/off_policy_ratio"] == 1


def test_groups_that_are_too_old_expire_and_their_environment_groups_open_the_next_episode():
    queue = make_queue(2, 2, batch=1, async_generation_ratio=1.0)
    assert [offers(queue, group) for group in range(2)] == [[0, 0], [0, 0]]  # one ahead
    play(queue, 1, 0, 0.0)  # half of it
    for step in (1, 2):
        play(queue, 0, step - 1, 0.0, 1.0)
        assert of(queue.get_batch()) == [(0, step - 1)]
        assert queue.is_wanted(1, 0)
        queue.advance_step(step)
        assert queue.get_episode_id(0, 0) == (step if step == 1 else None)
    assert not queue.is_wanted(1, 0)
    assert play_late(queue, 1, 0) is False
    assert queue.get_episode_id(1, 0) == 1
    assert queue.start_step(1, 1) == 2
    assert queue.metrics()["scheduler/expired_groups"] == 1


def play_late(queue: GroupQueue, group: int, episode: int) -> bool:
    return queue.put(group, episode, 0, {"reward": 1.0})


def test_a_member_must_report_the_step_in_which_its_episode_started():
    queue = make_queue(1, 2)
    fill(queue)
    queue.advance_step(1)
    episode = queue.get_episode_id(0, 0)
    assert episode is not None
    assert queue.start_step(0, episode) == 1
    with pytest.raises(QueueError, match=r"started in step 1, .* start_step 0"):
        queue.put(0, episode, 0, {"reward": 1.0})
    assert queue.put(0, episode, 1, {"reward": 1.0})


def test_a_step_needs_the_whole_batch_to_be_taken_and_only_goes_forward():
    queue = make_queue(2, 2)
    queue.advance_step(0)  # as a loop over steps says first: nothing changes
    with pytest.raises(QueueError, match="is not full yet"):
        queue.advance_step(1)
    for group in range(2):
        play(queue, group, 0, 0.0, 1.0)
    assert of(queue.get_batch(1)) == [(0, 0)]
    queue.advance_step(0)
    with pytest.raises(QueueError, match="1 groups that were not taken"):
        queue.advance_step(1)
    assert of(queue.get_batch(2)) == [(1, 0)]
    with pytest.raises(QueueError, match="has been taken"):
        queue.get_batch()
    queue.advance_step(3)
    assert queue.step == 3
    with pytest.raises(QueueError, match="only go forward"):
        queue.advance_step(2)
    for wrong in (0, 3, -1):
        with pytest.raises(QueueError, match="n_groups"):
            queue.get_batch(wrong)


def test_a_fresh_queue_can_begin_at_any_step():
    queue = make_queue(1, 2)
    queue.advance_step(7)
    assert queue.get_episode_id(0, 0) == 0
    assert queue.start_step(0, 0) == 7


@pytest.mark.parametrize(("max_traj_per_env", "fewest", "most"), [(-1, 4, 4), (1, 4, 4), (3, 5, 12)])
def test_max_traj_per_env_makes_room_for_groups_launched_ahead_of_expected_drops(max_traj_per_env: int, fewest: int, most: int):
    """Once two groups of three are seen to be dropped, more than the batch run at once, but not more than may be open."""
    played: list[int] = []
    running = 0
    queue = make_queue(4, 2, max_traj_per_env=max_traj_per_env, max_resample_rounds=1000, group_filter=lambda members: len(played) % 3 == 2)
    for step in range(12):
        while (batch := queue.get_batch()) is None:
            running = max(running, len({id(episode) for episode in queue._pending.values()}))
            for group in range(4):
                episode = queue.get_episode_id(group, 0)
                if episode is not None:
                    play(queue, group, episode, 0.0)
                    played.append(episode)
        assert len(batch) == 4
        queue.advance_step(step + 1)
    assert fewest <= running <= most


# ---------------------------------------------------------------- bounds and errors


def test_a_filter_that_never_keeps_ends_in_an_error_that_says_why():
    told: list[str] = []
    queue = make_queue(2, 2, group_filter=lambda members: False, max_resample_rounds=3, on_batch=lambda: told.append("batch"))
    for episode in range(3):
        for group in range(2):
            assert offers(queue, group) == [episode, episode]
            assert told == []
            play(queue, group, episode, 0.0, 1.0)
    assert told == ["batch"]
    for _ in range(2):
        with pytest.raises(ResampleError, match=r"kept 0 of 6 judged .*invalid/group_filter 6"):
            queue.get_batch()
    with pytest.raises(ResampleError):
        queue.advance_step(1)
    assert [offers(queue, group) for group in range(2)] == [[None, None], [None, None]]


def test_with_shrink_what_was_kept_is_the_batch():
    queue = make_queue(2, 2, group_filter=spread, max_resample_rounds=2, on_exhausted="shrink")
    for episode in (0, 1):
        offers(queue, 0)
        play(queue, 0, episode, 1.0, 1.0)
    offers(queue, 1)
    play(queue, 1, 0, 0.0, 1.0)
    assert of(queue.get_batch()) == [(1, 0)]


def test_a_filter_that_raises_names_the_group_and_stops_the_queue():
    def broken(members: Members) -> bool:
        raise KeyError("no such thing")

    queue = make_queue(2, 2, group_filter=broken)
    offers(queue, 1)
    with pytest.raises(FilterError, match=r"broken raised KeyError[\s\S]*g1/e0"):
        play(queue, 1, 0, 0.0, 1.0)
    with pytest.raises(FilterError, match="g1/e0"):
        queue.get_batch()
    assert queue.get_episode_id(0, 0) is None
    assert queue.put(0, 0, 0, {"reward": 1.0}) is False
    queue.close()


def test_a_ratio_guard_keeps_what_the_filter_would_drop_beyond_its_share():
    queue = make_queue(3, 2, guard=RatioGuard(0.5))
    for group in range(3):
        offers(queue, group)
    play(queue, 0, 0, 1.0, 1.0)  # the very first one is kept
    play(queue, 1, 0, 1.0, 1.0)  # one of two may go
    play(queue, 2, 0, 0.0, 1.0)
    assert queue.get_batch() is None
    offers(queue, 1)
    play(queue, 1, 1, 0.0, 1.0)
    assert of(queue.get_batch()) == [(0, 0), (2, 0), (1, 1)]
    assert queue.metrics()["scheduler/kept_by_guard"] == 1


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda queue: queue.get_episode_id(2, 0), "from 0 to 1, got 2"),
        (lambda queue: queue.get_episode_id(-1, 0), "from 0 to 1, got -1"),
        (lambda queue: queue.get_episode_id(0, 3), "from 0 to 2 .* got 3"),
        (lambda queue: queue.get_episode_id(0, -1), "from 0 to 2 .* got -1"),
        (lambda queue: queue.put(5, 0, 0, None), "from 0 to 1, got 5"),
        (lambda queue: queue.put(0, 0, 0, None), "has opened no episode yet, got episode 0"),
        (lambda queue: (queue.get_episode_id(0, 0), queue.put(0, 1, 0, None)), "the episodes 0 to 0, got episode 1"),
        (lambda queue: queue.is_wanted(0, -1), "got episode -1"),
        (lambda queue: queue.start_step(9, 0), "got 9"),
    ],
)
def test_what_cannot_be_is_a_clear_error(call: Callable[[GroupQueue], object], told: str):
    with pytest.raises(QueueError, match=told):
        call(make_queue(2, 2, 1))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_env_groups": 0}, "num_env_groups must be at least 1"),
        ({"group_size": 0}, "group_size must be at least 1"),
        ({"group_size_redundancy": -1}, "redundancy must be at least 0"),
        ({"rollout_batch_size": 7}, r"a multiple of group_size \(2\), got 7 - 8 is the next one"),
        ({"rollout_batch_size": 0}, "rollout_batch_size must be at least 1"),
        ({"rollout_batch_size": 12, "max_traj_per_env": 2}, "-1 or at least 3"),
        ({"max_traj_per_env": 0}, "-1 or at least 1"),
        ({"async_generation_ratio": -1.0}, "async_generation_ratio"),
        ({"max_staleness": 0, "async_generation_ratio": 1.0}, "max_staleness"),
        ({"max_resample_rounds": 0}, "max_resample_rounds"),
        ({"group_filter": 3}, "must be a plain function"),
        ({"group_filter": {"type": "std_filte"}}, "std_filter"),
        ({"group_filter": {"type": "std_filter"}, "group_size": 1}, "group_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed: dict[str, Any], told: str):
    given: dict[str, Any] = {"num_env_groups": 2, "group_size": 2, "rollout_batch_size": 4}
    with pytest.raises(ConfigError, match=told):
        GroupQueue(**given | changed)


# ---------------------------------------------------------------- filters


class Judge:
    """Drops what took too long, and remembers how many it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def judge(self, group: Group) -> Verdict:
        self.seen += 1
        if group.task.entry["episode"] == 0:
            return Verdict.dropped("first_one", "invalid", "judge", {"seen": float(self.seen)})
        return Verdict.kept()

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_an_object_with_judge_sees_the_group_and_its_verdict_is_kept():
    records: list[GroupRecord] = []
    judge = Judge()
    queue = make_queue(1, 2, group_filter=judge, on_left=records.append)
    assert of(fill(queue)) == [(0, 1)]
    assert judge.seen == 2
    assert [(record.task_id, record.outcome, record.category, record.reason, record.source, record.evidence) for record in records] == [
        ("g0/e0", "dropped", "invalid", "first_one", "judge", {"seen": 1.0})
    ]
    assert queue.metrics()["scheduler/rejected/invalid/first_one"] == 1
    assert queue.metrics()["scheduler/rejected_rate/invalid/first_one"] == 1  # one group has left, and it was this one
    assert queue.metrics()["batch/rejected_rate/invalid/first_one"] == 0.5  # of the two of this batch
    assert queue.metrics()["scheduler/group_filter_count"] == 1


@pytest.mark.parametrize(
    "given",
    [
        {"type": "std_filter"},
        {"type": "all", "filter_args": {"filters": [{"type": "env_failed"}, {"type": "std_filter"}]}},
        build_query_filter({"type": "std_filter"}, group_size=2),
    ],
)
def test_a_filter_of_this_project_or_its_configuration_will_do(given: Any):
    queue = make_queue(1, 2, group_filter=given)
    offers(queue, 0)
    play(queue, 0, 0, 1.0, 1.0)
    assert queue.get_episode_id(0, 0) == 1
    assert queue.metrics()["scheduler/rejected/low_information/no_spread"] == 1


def test_without_a_filter_every_whole_group_is_kept_and_one_without_a_reward_is_invalid():
    queue = make_queue(1, 2, group_filter=None)
    offers(queue, 0)
    play(queue, 0, 0, 1.0)
    assert queue.put(0, 0, 0, {"reward": None})  # it was delivered: it counts, and is not replaced
    assert queue.get_episode_id(0, 0) == 1
    assert queue.metrics()["scheduler/rejected/invalid/incomplete"] == 1
    play(queue, 0, 1, 1.0, 1.0)
    assert of(queue.get_batch()) == [(0, 1)]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_filter_sees_members_without_a_reward_and_keeps_no_group_of_them(keeps: bool):
    seen: list[Members] = []

    def judge(members: Members) -> bool:
        seen.append(members)
        return keeps

    queue = make_queue(1, 2, group_filter=judge)
    offers(queue, 0)
    play(queue, 0, 0, 1.0)
    queue.put(0, 0, 0, {"reward": None})
    assert [member["reward"] for member in seen[0]] == [1.0, None]
    assert queue.metrics()[f"scheduler/rejected/invalid/{'incomplete' if keeps else 'judge'}"] == 1


def test_a_broken_member_stops_its_group_at_once_where_the_filter_decides_by_one():
    queue = make_queue(1, 3, group_filter={"type": "env_failed"})
    offers(queue, 0)
    assert queue.put(0, 0, 0, dataclasses.replace(make_rollout(), flags=frozenset({"env_failed"})))
    assert not queue.is_wanted(0, 0)
    assert offers(queue, 0) == [1, 1, 1]
    assert queue.metrics()["scheduler/rejected/invalid/env_failed"] == 1


def test_a_wrong_answer_of_a_filter_names_it_and_the_answer():
    queue = make_queue(1, 1, group_filter=lambda members: "yes")
    queue.get_episode_id(0, 0)
    with pytest.raises(FilterError, match="'yes'"):
        play(queue, 0, 0, 1.0)


class Roll:
    """As ROLL has it: True drops."""

    def filter(self, group_id: int, episode_id: int, group: list[object]) -> bool:
        return True


async def waits(members: Members) -> bool:
    return True


@pytest.mark.parametrize(
    ("given", "told"), [(Judge, "build it"), (Roll(), "negate"), (waits, "plain function"), (object(), "plain function")]
)
def test_what_is_no_filter_is_refused(given: object, told: str):
    with pytest.raises(ConfigError, match=told):
        make_queue(group_filter=given)


# ---------------------------------------------------------------- members


def test_a_rollout_comes_back_with_the_ids_of_its_place():
    queue = make_queue(2, 2, group_filter={"type": "std_filter"})
    for group in range(2):
        offers(queue, group)
        for reward in (0.0, 1.0):
            queue.put(group, 0, 0, make_rollout(reward=reward, text=f"of {group}", attempt_id=77, group_id=66, task_id="mine"))
    batch = queue.get_batch()
    assert batch is not None
    members: list[Rollout] = [member for group in batch for member in group]
    assert [(one.group_id, one.member_index, one.reward, one.task_id, one.turns[0].text) for one in members] == [
        (0, 0, 0.0, "g0/e0", "of 0"),
        (0, 1, 1.0, "g0/e0", "of 0"),
        (1, 0, 0.0, "g1/e0", "of 1"),
        (1, 1, 1.0, "g1/e0", "of 1"),
    ]
    assert len({one.attempt_id for one in members}) == 4


def test_rollouts_of_different_problems_are_no_group():
    warnings: list[str] = []
    queue = make_queue(1, 2, group_filter=None, on_warning=warnings.append)
    offers(queue, 0)
    for env_id in ("apple", "pear"):
        queue.put(0, 0, 0, dataclasses.replace(make_rollout(), env_id=env_id))
    assert queue.get_episode_id(0, 0) == 1
    assert queue.metrics()["scheduler/rejected/invalid/different_problems"] == 1
    assert ["apple, pear" in warning for warning in warnings] == [True]


def test_rollouts_sampled_by_weights_that_are_too_old_expire():
    queue = make_queue(1, 1, group_filter=None)
    queue.advance_step(3)
    queue.get_episode_id(0, 0)
    assert queue.put(0, 0, 3, make_rollout(version=2))
    assert queue.get_episode_id(0, 0) == 1
    assert queue.metrics()["scheduler/expired_groups"] == 1
    assert queue.put(0, 1, 3, dataclasses.replace(make_rollout(), turns=()))  # says nothing of its weights: its start step counts
    assert queue.get_batch() is not None


def test_any_object_is_a_member_where_its_reward_can_be_read():
    queue = make_queue(1, 2, group_filter=lambda members: members == [("a", 1), ("b", 0)], reward_of=lambda member: member[1])
    offers(queue, 0)
    queue.put(0, 0, 0, ("a", 1))
    queue.put(0, 0, 0, ("b", 0))
    assert queue.get_batch() == [[("a", 1), ("b", 0)]]
    assert queue.metrics()["reward/kept_mean"] == 0.5


@pytest.mark.parametrize(("member", "told"), [({"score": 1.0}, "'score'"), (3.0, "float"), ({"reward": "high"}, "'high'")])
def test_a_member_without_a_reward_that_can_be_read_is_refused_and_changes_nothing(member: object, told: str):
    queue = make_queue(1, 2)
    offers(queue, 0)
    with pytest.raises(QueueError, match=told):
        queue.put(0, 0, 0, member)
    assert play(queue, 0, 0, 0.0, 1.0) == [True, True]
    assert of(queue.get_batch()) == [(0, 0)]


def test_a_reward_that_is_no_number_is_a_missing_one():
    queue = make_queue(1, 2, group_filter=None)
    offers(queue, 0)
    play(queue, 0, 0, 1.0, math.nan)
    assert queue.metrics()["scheduler/rejected/invalid/incomplete"] == 1


# ---------------------------------------------------------------- who is told, and the end


def test_whoever_waits_is_told_when_there_is_work_and_when_there_is_a_batch_and_may_ask_from_within():
    told: list[object] = []
    queue: GroupQueue

    def work() -> None:
        told.append([queue.get_episode_id(0, env) for env in range(2)])

    def batch() -> None:
        told.append(of(queue.get_batch()))
        queue.advance_step(queue.step + 1)

    queue = make_queue(1, 2, on_work=work, on_batch=batch)
    queue.advance_step(0)
    play(queue, 0, 0, 1.0, 1.0)
    play(queue, 0, 1, 0.0, 1.0)
    assert told == [[0, 0], [1, 1], [(0, 1)], [2, 2]]


def test_what_the_batch_waits_for_is_told_in_words():
    queue = make_queue(2, 2)
    offers(queue, 0)
    assert "4 members of 2 groups; the oldest is group 0 (task 'g0/e0')" in queue.waiting_for()
    fill(queue)
    assert queue.waiting_for() == ""


def test_after_close_every_group_has_left_and_nothing_is_wanted():
    records: list[GroupRecord] = []
    now = [10.0]
    queue = make_queue(2, 2, on_left=records.append, clock=lambda: now[0])
    offers(queue, 0)
    play(queue, 0, 0, 0.0, 1.0)
    now[0] = 12.5
    queue.close()
    queue.close()
    assert [(record.task_id, record.outcome, record.reason, record.seconds) for record in records] == [
        ("g0/e0", "discarded", "shutdown", 2.5),
        ("g1/e0", "cancelled", "shutdown", 2.5),
    ]
    assert not queue.is_wanted(1, 0)
    assert queue.put(1, 0, 0, {"reward": 1.0}) is False
    assert queue.get_episode_id(0, 0) is None
    with pytest.raises(QueueError, match="closed"):
        queue.get_batch()
    with pytest.raises(QueueError, match="closed"):
        queue.advance_step(1)


# ---------------------------------------------------------------- state


def resumed(queue: GroupQueue, **settings: Any) -> GroupQueue:
    later = make_queue(queue.num_env_groups, queue.group_size, **settings)
    later.load_state_dict(decode(encode(queue.state_dict())))
    return later


def test_kept_groups_come_back_whole_and_played_episodes_are_followed_by_new_ones_of_their_group():
    queue = make_queue(3, 2)
    for group in range(3):
        offers(queue, group)
    play(queue, 1, 0, 0.0, 1.0)
    play(queue, 2, 0, 0.0)
    later = resumed(queue)
    assert [offers(later, group) for group in range(3)] == [[1, 1], [None, None], [1, 1]]
    assert later.put(2, 0, 0, {"reward": 1.0}) is False
    for group in (0, 2):
        play(later, group, 1, 1.0, 0.0)
    batch = later.get_batch()
    assert [members[0]["of"] for members in batch or []] == [[1, 0], (0, 1), (2, 1)]  # the first through a file, that knows no tuples
    assert later.metrics()["scheduler/late_results"] == 1


def test_a_batch_that_was_taken_and_not_stepped_on_is_given_again():
    queue = make_queue(2, 1, group_filter=None)
    first = fill(queue)
    again = resumed(queue, group_filter=None).get_batch()
    assert [[member["reward"] for member in members] for members in again or []] == [[m["reward"] for m in group] for group in first]
    queue.advance_step(1)
    later = resumed(queue, group_filter=None)
    assert later.step == 1
    assert later.get_batch() is None
    assert later.get_episode_id(0, 0) == 2  # that of the saved one was being played


def test_rollouts_and_the_memory_of_a_filter_come_back():
    queue = make_queue(2, 1, group_filter=Judge())
    for episode in (0, 1):
        queue.get_episode_id(0, 0)
        queue.put(0, episode, 0, make_rollout(reward=0.5, text=f"e{episode}"))
    judge = Judge()
    later = resumed(queue, group_filter=judge)
    assert judge.seen == 2
    for episode in (1, 2):
        if later.get_episode_id(1, 0) == episode:
            later.put(1, episode, 0, make_rollout(reward=1.0))
    batch = later.get_batch()
    assert batch is not None
    assert [(one.turns[0].text, one.reward) for (one,) in batch] == [("e1", 0.5), ("1", 1.0)]


def test_a_state_that_does_not_fit_is_refused():
    saved = make_queue(2, 2).state_dict()
    for changed, told in (
        ({"version": 2}, "version must be 1"),
        ({"num_env_groups": 3}, "num_env_groups must be 2"),
        ({"next_episode": [0]}, "torn"),
        ({"turn": 2}, "torn"),
        ({"owed": [5]}, "torn"),
        ({"kept": [[1]]}, "torn"),
        ({"machine": {}}, "torn"),
    ):
        with pytest.raises(RecordError, match=told):
            make_queue(2, 2).load_state_dict(saved | changed)
    with pytest.raises(RecordError, match="seed"):
        make_queue(2, 2, seed=1).load_state_dict(saved)
    with pytest.raises(RecordError, match="group_size"):
        make_queue(2, 3).load_state_dict(saved)
    begun = make_queue(2, 2)
    begun.get_batch()
    with pytest.raises(RecordError, match="fresh"):
        begun.load_state_dict(saved)


def test_case_92_a_put_never_waits_whatever_is_full():
    """Case 92: the batch is full and nobody takes it: what comes is ignored and counted, and the end comes at once."""
    queue = make_queue(1, 1, 2, group_filter=None)
    assert offers(queue, 0) == [0, 0, 0]
    assert [queue.put(0, 0, 0, {"reward": 1.0}) for _ in range(3)] == [True, False, False]
    queue.close()
    assert queue.metrics()["scheduler/late_results"] == 2
    assert queue.metrics()["ledger/groups/discarded"] == 1


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/scheduling.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("(") for line in lines] == [4, 4, 4]
    assert any(float(line.rpartition(" ")[2]) > 0 for line in lines)
