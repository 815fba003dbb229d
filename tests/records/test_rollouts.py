"""What was recorded is what is read, nothing twice, and nothing missing but what was not flushed before a kill."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.config.models import FilterConfig
from sluice.errors import RecordError
from sluice.filters import RatioGuard
from sluice.records import RecordedGroup, RolloutRecorder, RunFolder, read_rollouts, rollback_rollouts, rollout_parts
from sluice.records.checkpoints import decode, encode
from sluice.scheduler import Scheduler, SchedulerConfig
from sluice.scheduler import events as ev
from sluice.types import Failure, Rollout, Turn
from tests.fakes import ListSource, MachinePlayer, make_filters, make_rollout, make_task, make_turn
from tests.records.conftest import make_record

FACTS = {"identity": "a run", "exp_name": "exp", "seed": 42}


def members_of(group_id: int, rewards: Sequence[float | None] = (1.0, 0.0)) -> list[Rollout]:
    return [
        make_rollout(reward=reward, attempt_id=10 * group_id + index, group_id=group_id, member_index=index, task_id=f"task-{group_id}")
        for index, reward in enumerate(rewards)
    ]


def tell(
    recorder: RolloutRecorder, group_id: int, rollouts: Iterable[Rollout] | None = None, *, is_whole: bool = True, **changes: Any
) -> None:
    """A group whose members are delivered and stay."""
    rollouts = members_of(group_id) if rollouts is None else list(rollouts)
    for rollout in rollouts:
        recorder.member(rollout)
    members = [(rollout, rollout.reward is not None) for rollout in rollouts]
    recorder.group(make_record(group_id, **changes), members, is_whole=is_whole)


def record_groups(folder: Path, *parts: Iterable[int]) -> None:
    """Parts with these groups."""
    recorder = RolloutRecorder(folder, FACTS)
    for part in parts:
        for group_id in part:
            tell(recorder, group_id)
        recorder.flush()
    recorder.close()


def ids_in(folder: Path) -> list[int]:
    return [group.group_id for group in read_rollouts(folder)]


def bits(rollout: Rollout) -> Any:
    """Everything in a rollout, to be compared exactly."""
    turns = [
        tuple(
            (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
            for value in (getattr(turn, field.name) for field in fields(Turn))
        )
        for turn in rollout.turns
    ]
    return (replace(rollout, turns=(), metrics={}), {name: np.float64(value).tobytes() for name, value in rollout.metrics.items()}, turns)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "rollouts"


# ---------------------------------------------------------------- what goes in comes out

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def arrays(draw: st.DrawFn, kind: type[np.generic], size: int | None = None) -> np.ndarray[Any, Any]:
    length = draw(st.integers(0, 6)) if size is None else size
    if kind is np.float32:
        return np.frombuffer(draw(st.binary(min_size=4 * length, max_size=4 * length)), dtype=np.float32).copy()  # NaNs of every kind
    return np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), dtype=np.int64)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    size = draw(st.integers(0, 5))
    return Turn(
        prompt_ids=draw(arrays(np.int64)),
        token_ids=draw(arrays(np.int64, size)),
        inference_logprobs=draw(arrays(np.float32, size)),
        text=draw(texts),
        finish_reason=draw(st.sampled_from(["stop", "length", "cancelled"])),
        policy_version=draw(st.integers(-1, 2**40)),
        token_versions=draw(st.none() | arrays(np.int64, size)),
        observation=draw(texts),
        action=draw(st.none() | texts),
        is_admissible=draw(st.none() | st.booleans()),
        reward=draw(st.none() | finite),
        progress=draw(st.none() | finite),
    )


@st.composite
def rollouts_of(draw: st.DrawFn, group_id: int, attempt_id: int, member_index: int) -> Rollout:
    failures = st.builds(Failure, cause=st.sampled_from(["policy", "infrastructure"]), reason=texts, detail=texts)
    return Rollout(
        attempt_id=attempt_id,
        group_id=group_id,
        member_index=member_index,
        task_id="a task",
        turns=tuple(draw(st.lists(turns(), max_size=4))),
        finish_reason=draw(st.sampled_from(["stop", "length", "completed", "max_turns", "env_failed", "env_timeout", "timeout"])),
        reward=draw(st.none() | finite),
        metrics=draw(st.dictionaries(texts, st.floats(), max_size=3)),
        failure=draw(st.none() | failures),
        seconds=draw(finite),
        flags=draw(st.frozensets(st.sampled_from(["env_timeout", "env_failed", "drop_flag"]))),
        env_id=draw(st.none() | texts),
        task_type=draw(st.none() | texts),
    )


@st.composite
def told_groups(draw: st.DrawFn, group_id: int) -> tuple[dict[str, Any], list[tuple[Rollout, bool]], list[Rollout]]:
    """Changes of a record, members with whether they count, and rejected attempts."""
    size, rejected = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    made = [draw(rollouts_of(group_id, 10 * group_id + place, place)) for place in range(size)]
    changes = {"task_id": "a task", "domain": draw(texts), "category": draw(st.sampled_from([None, "invalid", "low_information"]))}
    changes |= {"seconds": draw(finite), "attempts": draw(st.integers(1, 99)), "end_step": draw(st.integers(0, 2**40))}
    return (
        changes | {"outcome": draw(st.sampled_from(["trained", "dropped", "expired", "surplus"])), "reason": draw(texts)},
        [(rollout, draw(st.booleans())) for rollout in made],
        [draw(rollouts_of(group_id, 10 * group_id + 5 + place, place)) for place in range(rejected)],
    )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    groups=st.integers(1, 3).flatmap(lambda count: st.tuples(*(told_groups(group_id) for group_id in range(count)))), rows=st.integers(1, 9)
)
def test_every_bit_of_every_rollout_comes_back(groups: Any, rows: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run") / "rollouts"
    recorder = RolloutRecorder(folder, FACTS, rows_per_part=rows)
    records = []
    for group_id, (changes, members, rejected) in enumerate(groups):
        for rollout in (*rejected, *(rollout for rollout, _ in members)):
            recorder.member(rollout)
        records.append(make_record(group_id, **changes))
        recorder.group(records[-1], members, is_whole=True)
    recorder.close()
    read = list(read_rollouts(folder))
    assert [group.group_id for group in read] == [record.group_id for record in records]
    for group, record, (_, members, rejected) in zip(read, records, groups, strict=True):
        assert [bits(rollout) for rollout in group.members] == [bits(rollout) for rollout, _ in members]
        assert [bits(rollout) for rollout in group.rejected] == [bits(rollout) for rollout in rejected]
        assert group.counted == tuple(is_counted for _, is_counted in members)
        known = {field.name for field in fields(RecordedGroup)} & {field.name for field in fields(record)}
        assert {name: getattr(group, name) for name in known} == {name: getattr(record, name) for name in known}


def test_a_group_reads_as_the_group_that_the_filters_saw(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    tell(recorder, 3, members_of(3, (1.0, None, 0.5)), epoch=2, start_step=7)
    recorder.close()
    (recorded,) = read_rollouts(place)
    group = recorded.as_group()
    assert (group.group_id, group.epoch, group.start_step, group.task.task_id) == (3, 2, 7, "task-3")
    assert group.task.prompt_ids.tolist() == [5, 6, 7]
    assert group.counted == (True, False, True)
    assert np.array_equal(recorded.rewards, [1.0, math.nan, 0.5], equal_nan=True)
    assert np.array_equal(group.rewards, recorded.rewards, equal_nan=True)


def test_texts_that_no_file_can_hold_are_spelled_and_strange_metrics_left_out(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    turn = replace(make_turn(text="a\ud800b"), observation="\udfff")
    strange: Any = {"good": np.float32(0.5), "a\ud800": 1, "word": "no number", "nothing": None}
    tell(recorder, 1, [replace(make_rollout(group_id=1), turns=(turn,), metrics=strange)])
    recorder.close()
    (group,) = read_rollouts(place)
    (member,) = group.members
    assert (member.turns[0].text, member.turns[0].observation) == ("a?b", "?")
    assert member.metrics == {"good": 0.5, "a?": 1.0}


# ---------------------------------------------------------------- what is recorded, and what is not


@pytest.mark.parametrize(
    ("outcome", "is_whole", "is_recorded"),
    [
        ("trained", True, True),
        ("surplus", True, True),
        ("expired", True, True),
        ("discarded", True, True),
        ("dropped", True, True),
        ("dropped", False, True),
        ("expired", False, False),
        ("cancelled", False, False),
    ],
)
def test_a_group_is_recorded_when_it_was_whole_or_was_dropped(outcome: str, is_whole: bool, is_recorded: bool, place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    tell(recorder, 1, outcome=outcome, is_whole=is_whole)
    recorder.close()
    assert ids_in(place) == [1] * is_recorded


def test_members_of_a_restored_group_are_there_though_this_process_never_saw_them_delivered(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    recorder.group(make_record(1), [(rollout, True) for rollout in members_of(1)], is_whole=True)
    recorder.close()
    (group,) = read_rollouts(place)
    assert [member.reward for member in group.members] == [1.0, 0.0]


def test_a_reward_that_a_loop_changed_is_the_one_that_the_group_was_judged_by(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    first, second = members_of(1)
    recorder.member(first)
    recorder.member(second)
    recorder.group(make_record(1), [(replace(first, reward=0.25), True), (second, True)], is_whole=True)
    recorder.close()
    (group,) = read_rollouts(place)
    assert [member.reward for member in group.members] == [0.25, 0.0]
    assert group.rejected == ()


def test_a_group_of_which_only_rejected_members_came_is_recorded_with_them(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    recorder.member(members_of(1)[0])
    recorder.group(make_record(1, outcome="dropped", reason="response_retries", category="invalid"), (), is_whole=False)
    recorder.group(make_record(2, outcome="dropped", reason="group_timeout", category="invalid"), (), is_whole=False)
    recorder.close()
    (group,) = read_rollouts(place)
    assert (group.group_id, group.members, [rollout.attempt_id for rollout in group.rejected]) == (1, (), [10])


def test_nothing_is_kept_of_groups_that_have_left(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    for group_id in range(3):
        tell(recorder, group_id, is_whole=group_id == 0, outcome="cancelled")
    recorder.flush()
    assert not recorder._delivered
    assert not recorder._waiting
    assert recorder._waiting_bytes == 0
    recorder.close()


# ---------------------------------------------------------------- parts


def test_a_group_never_spans_two_parts(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS, rows_per_part=3)
    for group_id in range(20):
        tell(recorder, group_id)
        if group_id % 7 == 0:
            recorder.flush()
    recorder.close()
    parts = [set(pq.read_table(path, partitioning=None)["group_id"].to_pylist()) for path in read_rollouts(place).parts]
    assert len(parts) > 3
    assert sum(map(len, parts)) == 20 == len(set.union(*parts))
    assert ids_in(place) == list(range(20))


def test_what_was_told_is_written_after_a_while_without_anybody_waiting(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS, part_every_s=0.0)
    tell(recorder, 1)
    recorder._wake.set()
    seen = threading.Event()
    while not read_rollouts(place.parent).parts:
        assert not seen.wait(0.01)
    assert ids_in(place.parent) == [1]
    recorder.close()


def test_a_recording_from_before_progress_was_recorded_is_still_read(folder: RunFolder) -> None:
    record_groups(folder.rollouts, [1])
    (path,) = read_rollouts(folder.path).parts
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["progress"]), path)
    (group,) = read_rollouts(folder.path)
    assert [turn.progress for member in group.members for turn in member.turns] == [None] * sum(len(one.turns) for one in group.members)


def test_the_facts_of_the_run_are_in_every_part(folder: RunFolder) -> None:
    record_groups(folder.rollouts, [1])
    recording = read_rollouts(folder.path)
    assert recording.facts == {"schema_version": rollout_parts.SCHEMA_VERSION, **FACTS}
    (path,) = recording.parts
    assert json.loads(pq.read_schema(path).metadata[b"sluice"]) == recording.facts


def test_a_new_recorder_goes_on_behind_the_parts_that_are_there(place: Path) -> None:
    record_groups(place, [1], [2])
    (place / ".part-000003.parquet.unfinished").write_bytes(b"torn by a kill")
    record_groups(place, [3])
    assert sorted(path.name for path in place.iterdir()) == [f"part-{number:06}.parquet" for number in (1, 2, 3)]
    assert ids_in(place) == [1, 2, 3]


def test_members_told_by_one_thread_while_others_flush_are_all_there(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS, rows_per_part=16)
    done = threading.Event()
    problems: list[BaseException] = []

    def flush_all_the_time() -> None:
        try:
            while not done.is_set():
                recorder.flush()
                ids = ids_in(place)
                assert ids == list(range(len(ids)))
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=flush_all_the_time) for _ in range(2)]
    for thread in threads:
        thread.start()
    for group_id in range(500):
        tell(recorder, group_id)
    done.set()
    for thread in threads:
        thread.join(30)
    recorder.close()
    assert not problems
    assert ids_in(place) == list(range(500))


# ---------------------------------------------------------------- kills and resuming

RECORD_UNTIL_KILLED = """
import itertools, sys
from pathlib import Path
from sluice.records import RolloutRecorder
from tests.records.test_rollouts import FACTS, tell
recorder = RolloutRecorder(Path(sys.argv[1]), FACTS, rows_per_part=20)
for group_id in itertools.count():
    tell(recorder, group_id)
    if group_id % 50 == 49:
        recorder.flush()
        print(group_id + 1, flush=True)
"""


def test_a_kill_leaves_whole_parts_with_everything_that_was_flushed(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RECORD_UNTIL_KILLED, place], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(4)][-1]
        process.kill()
        flushed = max([flushed, *(int(line) for line in process.stdout)])
    ids = ids_in(place)
    assert ids == list(range(len(ids)))
    assert len(ids) >= flushed == 50 * (flushed // 50)


def test_a_recorder_that_was_never_closed_leaves_what_was_flushed(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    tell(recorder, 1)
    recorder.flush()
    tell(recorder, 2)
    assert ids_in(place) == [1]
    recorder.close()
    recorder.close()
    assert ids_in(place) == [1, 2]


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    next_group=st.integers(0, 14),
    open_groups=st.sets(st.integers(0, 14)),
)
def test_a_rollback_takes_out_what_the_resumed_run_makes_again_and_nothing_else(
    parts: list[int], next_group: int, open_groups: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "rollouts"
    groups = iter(range(100))
    record_groups(folder, *([next(groups) for _ in range(size)] for size in parts))
    before = list(read_rollouts(folder))
    stamps = {path: path.stat().st_ino for path in read_rollouts(folder).parts}
    gone = {group.group_id for group in before if group.group_id >= next_group or group.group_id in open_groups}
    touched = {path for path in stamps if set(pq.read_table(path, partitioning=None)["group_id"].to_pylist()) & gone}
    assert rollback_rollouts(folder, next_group=next_group, open_groups=sorted(open_groups)) == 2 * len(gone)
    after = list(read_rollouts(folder))
    assert [group.group_id for group in after] == [group.group_id for group in before if group.group_id not in gone]
    same = {group.group_id: [bits(member) for member in group.members] for group in before}
    assert all([bits(member) for member in group.members] == same[group.group_id] for group in after)
    assert {path for path in stamps if not path.exists() or path.stat().st_ino != stamps[path]} == touched
    assert all(json.loads(pq.read_schema(path).metadata[b"sluice"])["identity"] == "a run" for path in read_rollouts(folder).parts)
    assert rollback_rollouts(folder, next_group=next_group, open_groups=sorted(open_groups)) == 0


def test_a_rollback_that_was_killed_is_finished_by_the_next_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_groups(place, [0, 3], [1, 4], [2, 5])
    write, calls = rollout_parts.write_part, []

    def killed(path: Path, *rest: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.with_name(f".{path.name}.unfinished").write_bytes(b"torn")
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(rollout_parts, "write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        rollback_rollouts(place, next_group=3, open_groups=())
    assert sorted(ids_in(place)) == [0, 1, 2, 4, 5]
    rollback_rollouts(place, next_group=3, open_groups=())
    assert ids_in(place) == [0, 1, 2]
    assert len(list(place.iterdir())) == 3


def test_a_damaged_part_stops_a_rollback_before_anything_has_changed(place: Path) -> None:
    record_groups(place, [0, 1], [2, 3])
    damaged = place / "part-000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(RecordError, match=r"part-000002\.parquet must be a whole Parquet file"):
        rollback_rollouts(place, next_group=1, open_groups=())
    damaged.unlink()
    assert ids_in(place) == [0, 1]


def test_a_run_without_recorded_rollouts_has_nothing_to_roll_back(tmp_path: Path) -> None:
    assert rollback_rollouts(tmp_path / "rollouts", next_group=0, open_groups=()) == 0


# ---------------------------------------------------------------- a machine that is recorded


@dataclass
class RecordedPlayer(MachinePlayer):
    """Tells a recorder what a shell tells it, and remembers it."""

    recorder: RolloutRecorder | None = None
    told: dict[int, ev.RecordGroup] = field(default_factory=dict)  # as run.db has them
    delivered: dict[int, list[int]] = field(default_factory=dict)  # group_id -> attempts that delivered to this process

    def tell(self, event: ev.Event, seconds: float = 1.0) -> None:
        if isinstance(event, ev.MemberFinished):
            assert self.recorder is not None
            self.recorder.member(event.rollout)
            self.delivered.setdefault(event.rollout.group_id, []).append(event.rollout.attempt_id)
        super().tell(event, seconds)

    def carry_out_unchecked(self, instructions: Iterable[ev.Instruction]) -> None:
        before = len(self.instructions)
        super().carry_out_unchecked(instructions)
        for instruction in self.instructions[before:]:
            if isinstance(instruction, ev.RecordGroup):
                assert self.recorder is not None
                self.recorder.group(instruction.record, instruction.members, is_whole=instruction.is_whole)
                self.told[instruction.record.group_id] = instruction

    def check(self) -> None:
        """Not here: the counts of a resumed machine are checked by its own tests."""

    def resume(self, state: dict[str, Any], recorder: RolloutRecorder) -> RecordedPlayer:
        """A new process from this state; run.db is rolled back."""
        old = self.scheduler
        guard = None if old.guard is None else RatioGuard(0.5, policy="wait")
        later = RecordedPlayer(
            Scheduler(old.config, old.filters, guard=guard), ListSource(make=lambda i: make_task(f"t{i}")), recorder=recorder
        )
        machine = state["machine"]
        gone = set(machine["open_groups"])
        later.told = {number: told for number, told in self.told.items() if number < machine["next_group"] and number not in gone}
        later.source._position = state["drawn"]
        tasks = {f"t{number}": make_task(f"t{number}") for number in range(1000)}
        later.carry_out_unchecked(later.scheduler.load_state_dict(machine, tasks))
        return later

    def state(self) -> dict[str, Any]:
        return {"machine": decode(encode(self.scheduler.state_dict(dict.fromkeys(self.pending, 1)))), "drawn": self.source._position}


MODES: list[dict[str, Any]] = [
    {},
    {"async_generation_ratio": 1.0, "redundancy": 1},
    {"fill": "shrink", "truncated": "drop_group"},
    {"on_member_failure": "judge", "surplus": "carry", "max_staleness": 2, "max_additional_running_prompts": 2},
    {"guard": True, "async_generation_ratio": 1.5, "max_response_rounds": 2},
    {
        "on_exhausted": "keep_low_information",
        "max_resample_rounds": 2,
        "response": {"type": "finish_reason", "filter_args": {"allowed": ["stop"]}},
    },
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1_000_000), saves=st.sets(st.integers(0, 90), max_size=4), kills=st.sets(st.integers(0, 90), max_size=3))
def test_a_run_that_is_killed_and_resumed_records_what_run_db_has_nothing_twice_and_nothing_else(
    mode: dict[str, Any], seed: int, saves: set[int], kills: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, chance = tmp_path_factory.mktemp("run"), random.Random(seed)
    place = folder / "0"
    config = {name: value for name, value in mode.items() if name not in ("guard", "response")}
    response = FilterConfig(**mode["response"]) if "response" in mode else None
    filters = make_filters(response=response, group_size=2)
    guard = RatioGuard(0.5, policy="wait") if "guard" in mode else None
    make = partial(RolloutRecorder, facts=FACTS, rows_per_part=5, part_every_s=1e9)
    machine = Scheduler(SchedulerConfig(group_size=2, **config), filters, guard=guard)
    player = RecordedPlayer(machine, ListSource(make=lambda i: make_task(f"t{i}")), recorder=make(place))
    state = player.state()
    for moment in range(100):
        assert player.recorder is not None
        if player.failures:
            break
        if moment in saves:
            state = player.state()
            player.recorder.flush()
        if moment in kills:
            if chance.random() < 0.7:  # the writer may have got that far
                player.recorder.flush()
            place = folder / str(moment + 1)
            shutil.copytree(player.recorder._folder, place, ignore=shutil.ignore_patterns(".*"))  # what a kill leaves
            player.recorder.close()
            rollback_rollouts(place, next_group=state["machine"]["next_group"], open_groups=state["machine"]["open_groups"])
            player = player.resume(state, make(place))
        elif player.scheduler.filling is not None and player.pending:
            attempt_id = chance.choice(sorted(player.pending))
            if chance.random() < 0.1:
                player.fail(attempt_id)
            else:
                reward = chance.choice([0.0, 1.0, 1.0, None])
                player.finish(attempt_id, reward, finish_reason=chance.choice(["stop", "stop", "length"]))
        elif player.scheduler._delivered:
            player.step()
        elif player.scheduler.filling is None:
            player.want(2)
    player.tell(ev.Shutdown())
    assert player.recorder is not None
    player.recorder.close()
    recorded = {group.group_id: group for group in read_rollouts(place)}
    attempts = [rollout.attempt_id for group in recorded.values() for rollout in (*group.members, *group.rejected)]
    assert len(attempts) == len(set(attempts))  # no mixture of two processes, no member twice (public reports, case 98)
    for group_id, told in player.told.items():
        members = [rollout.attempt_id for rollout, _ in told.members]
        record = told.record
        if record.outcome in ("trained", "surplus"):
            assert told.is_whole
            assert len(members) == 2
        if record.outcome == "cancelled":
            assert not told.is_whole
        group = recorded.pop(group_id, None)
        if group is None:
            assert not (told.is_whole or record.outcome == "dropped") or not (members or player.delivered.get(group_id))
            continue
        assert [rollout.attempt_id for rollout in group.members] == members
        assert group.counted == tuple(is_counted for _, is_counted in told.members)
        assert (group.outcome, group.reason, group.category, group.end_step) == (
            record.outcome,
            record.reason,
            record.category,
            record.end_step,
        )
        assert [rollout.reward for rollout in group.members if rollout.reward is not None] == [r for r in record.rewards if r is not None]
        if group_id in player.delivered:
            assert {rollout.attempt_id for rollout in (*group.members, *group.rejected)} == set(player.delivered[group_id])
    assert not recorded


# ---------------------------------------------------------------- disks that fail


def fails(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for_the_end_of(recorder: RolloutRecorder) -> None:
    recorder._wake.set()
    recorder._thread.join(10)
    assert not recorder._thread.is_alive()


@pytest.fixture
def full_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutRecorder:
    """A recorder whose writer has met a full disk with one group in hand."""
    recorder = RolloutRecorder(place, FACTS, rows_per_part=1)
    monkeypatch.setattr(rollout_parts.os, "fsync", fails)
    tell(recorder, 1)
    wait_for_the_end_of(recorder)
    return recorder


def test_a_full_disk_is_told_once_to_the_run_and_every_time_to_who_waits(full_disk: RolloutRecorder, place: Path) -> None:
    with pytest.raises(RecordError, match=r"rollouts of 4 members could not be written \(0 are\), got: No space left on device"):
        tell(full_disk, 2)
    tell(full_disk, 3)  # the run is ending: it still has records to write
    for wait in (full_disk.flush, full_disk.close):
        with pytest.raises(RecordError, match="rollouts of 6 members could not be written"):
            wait()
    full_disk.close()
    assert list(place.iterdir()) == []


def test_what_was_in_hand_is_written_at_the_end_when_the_disk_has_space_again(
    full_disk: RolloutRecorder, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    full_disk.close()
    assert ids_in(place) == [1]


def test_what_came_after_the_fault_is_lost_and_said_so(full_disk: RolloutRecorder, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError):
        tell(full_disk, 2)
    monkeypatch.undo()
    with pytest.raises(RecordError, match=r"rollouts of 2 members could not be written \(2 are\)"):
        full_disk.close()
    assert ids_in(place) == [1]


def test_a_flush_that_waits_while_the_disk_fails_does_not_hang(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RolloutRecorder(place, FACTS)
    monkeypatch.setattr(rollout_parts.os, "replace", fails)
    tell(recorder, 1)
    with pytest.raises(RecordError, match="No space left"):
        recorder.flush()
    with pytest.raises(RecordError, match="No space left"):
        recorder.close()


def test_a_disk_that_is_too_slow_ends_the_run_and_bounds_what_waits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RolloutRecorder(place, FACTS, rows_per_part=1, max_waiting_bytes=20_000)
    write, may_go_on = rollout_parts.write_part, threading.Event()

    def slow(*arguments: Any) -> None:
        may_go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(rollout_parts, "write_part", slow)
    with pytest.raises(RecordError, match="the disk must keep up with the run"):  # noqa: PT012 - one of them does, whichever it is
        for group_id in range(100):
            tell(recorder, group_id)
    told = recorder._told_rows // 2
    assert 2 < told < 20
    tell(recorder, 100)
    with pytest.raises(RecordError, match="keep up"):
        recorder.flush(0.01)
    may_go_on.set()
    with pytest.raises(RecordError, match="keep up"):
        recorder.close()
    assert ids_in(place) == list(range(told))


def test_a_flush_waits_no_longer_than_it_may(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RolloutRecorder(place, FACTS)
    write, may_go_on = rollout_parts.write_part, threading.Event()

    def slow(*arguments: Any) -> None:
        may_go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(rollout_parts, "write_part", slow)
    tell(recorder, 1)
    with pytest.raises(RecordError, match=r"must be on disk within 0\.01 s, 2 members still wait"):
        recorder.flush(0.01)
    may_go_on.set()
    recorder.close()
    assert ids_in(place) == [1]


def test_what_does_not_fit_is_named_as_a_fault_of_ours(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    tell(recorder, 1, [replace(make_rollout(group_id=1), turns=(replace(make_turn(), token_ids=np.array([2**40, 1])),))])
    with pytest.raises(RecordError, match="ArrowInvalid: Integer value 1099511627776 not in range.* please report it"):
        recorder.flush()
    with pytest.raises(RecordError, match="please report it"):
        recorder.close()


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, unprivileged: Callable[[], Any]) -> None:
    place = tmp_path / "rollouts"
    place.mkdir(mode=0o755)
    with unprivileged(), pytest.raises(RecordError, match="must be writable, got: Permission denied"):
        RolloutRecorder(place, FACTS)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RecordError, match="must be writable, got: File exists"):
        RolloutRecorder(file, FACTS)


def test_pyarrow_is_asked_for_by_name_where_it_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sluice.records.rollout_parts")
    monkeypatch.delattr("sluice.records.rollout_parts")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RecordError, match=r"need the package pyarrow.*pip install 'sluice-rl\[train\]'"):
        RolloutRecorder(place, FACTS)


def test_nothing_is_taken_after_the_end(place: Path) -> None:
    recorder = RolloutRecorder(place, FACTS)
    recorder.close()
    with pytest.raises(RecordError, match="before the recorder is closed"):
        tell(recorder, 1)
    with pytest.raises(RecordError, match="before the recorder is closed"):
        recorder.flush()


# ---------------------------------------------------------------- reading


def test_the_reader_says_what_is_wrong_with_a_place(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such place must be a run folder, got: No such file"):
        read_rollouts(tmp_path / "no such place")
    with pytest.raises(RecordError, match="must hold recorded rollouts, but has none - record them with 'sluice train --record'"):
        read_rollouts(tmp_path)
    (tmp_path / "rollouts").mkdir()
    assert list(read_rollouts(tmp_path)) == []
    assert read_rollouts(str(tmp_path)).facts == {}


@pytest.mark.parametrize(("left", "word"), [(0, "whole Parquet file"), (5, "whole Parquet file"), (-1, "whole Parquet file")])
def test_a_torn_part_is_named(left: int, word: str, place: Path) -> None:
    record_groups(place, [1], [2])
    torn = place / "part-000002.parquet"
    torn.write_bytes(torn.read_bytes()[:left])
    groups = iter(read_rollouts(place))
    assert next(groups).group_id == 1
    with pytest.raises(RecordError, match=rf"part-000002\.parquet must be a {word}"):
        next(groups)


def test_a_part_with_a_damaged_page_is_named(place: Path) -> None:
    record_groups(place, [1])
    (path,) = read_rollouts(place).parts
    content = bytearray(path.read_bytes())
    content[10:400] = bytes(390)
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"part-000001\.parquet must be a whole Parquet file"):
        list(read_rollouts(place))


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path, partitioning=None)), path)


def with_facts(**changes: Any) -> Callable[[pa.Table], pa.Table]:
    facts = {"schema_version": rollout_parts.SCHEMA_VERSION, **FACTS, **changes}
    return lambda table: table.replace_schema_metadata({b"sluice": json.dumps(facts)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.replace_schema_metadata(None), "got another program's Parquet file"),
        (lambda table: table.replace_schema_metadata({b"sluice": "[1]"}), "got another program's Parquet file"),
        (with_facts(schema_version=99), "must have schema version 1, got 99 - read it with the version of Sluice that wrote it"),
        (lambda table: table.drop_columns(["reward"]), "must have the columns that Sluice records"),
        (with_facts(identity="another"), "must be of run a run, as the parts before it, got run another"),
    ],
)
def test_a_foreign_part_is_refused(change: Callable[[pa.Table], pa.Table], message: str, place: Path) -> None:
    record_groups(place, [1], [2])
    rewritten(place / "part-000002.parquet", change)
    with pytest.raises(RecordError, match=message):
        list(read_rollouts(place))


def test_a_group_that_is_there_twice_is_refused(place: Path) -> None:
    record_groups(place, [1], [2])
    (place / "part-000003.parquet").write_bytes((place / "part-000001.parquet").read_bytes())
    with pytest.raises(RecordError, match="got group 1 again"):
        list(read_rollouts(place))


def test_other_files_in_the_folder_are_no_parts(place: Path) -> None:
    record_groups(place, [1])
    (place / "_notes.txt").write_bytes(b"mine")
    (place / ".part-000002.parquet.unfinished").write_bytes(b"being written")
    assert ids_in(place) == [1]
    assert pq.read_table(place)["group_id"].to_pylist() == [1, 1]  # nor for other readers


def test_a_part_that_goes_while_it_is_read_is_told(place: Path) -> None:
    record_groups(place, [1], [2])
    groups = iter(read_rollouts(place))
    next(groups)
    rollback_rollouts(place, next_group=2, open_groups=())
    with pytest.raises(RecordError, match="was the run resumed"):
        next(groups)


def test_the_reader_imports_neither_torch_nor_a_trainer() -> None:
    code = "import sys; import sluice.records; sys.exit(bool({'torch', 'transformers', 'trl', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
