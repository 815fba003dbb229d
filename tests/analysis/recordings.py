"""Recordings for tests: groups of trajectories, files of them, and where the published files are."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from sluice.analysis import Member, Recorded, Trajectories, TrajectoryGroup
from sluice.records import RolloutRecorder
from sluice.types import Rollout
from tests.fakes import make_rollout, make_turn
from tests.records.conftest import make_record

ROOT = Path(__file__).parents[2]
PLACES = [Path(os.environ["SLUICE_SHARED"])] if "SLUICE_SHARED" in os.environ else [ROOT / "shared", ROOT.parent / "shared"]
DISTANCE = "prefix_edit_distance_mean"


def published(name: str) -> Path:
    """A released file of arXiv 2605.05802 (CC BY 4.0); the test is skipped where it is not at hand."""
    name = f"selective_rollout_{name}.csv"
    found = next((place / "data" / name for place in PLACES if (place / "data" / name).is_file()), None)
    if found is None:
        pytest.skip(f"{name} is not here: set SLUICE_SHARED to the folder that holds data/{name}")
    return found


# ---------------------------------------------------------------- groups


def some_groups(n: int = 60, g: int = 4, horizon: int = 8, seed: int = 0, observations: bool = True) -> list[TrajectoryGroup]:
    """Groups whose members part early or late; those that part late have equal rewards rather often."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        spread = rng.random()
        members = []
        is_equal = rng.random() > spread
        for _ in range(g):
            length = int(rng.integers(2, horizon + 1))
            actions = [f"a{t}" if rng.random() > spread else f"b{rng.integers(3)}" for t in range(length)]
            seen = [f"o{rng.integers(2)}" for _ in range(length)] if observations else None
            members.append(Member(actions=actions, observations=seen, reward=1.0 if is_equal else float(rng.integers(2))))
        found.append(TrajectoryGroup(key=f"group {i:03}", members=members, task_type=("look", "put")[i % 2]))
    return found


def some_recorded(ks: Sequence[int] = (2, 3, 5), horizon: int = 8, **changes: Any) -> Recorded:
    return Trajectories.of_groups(some_groups(horizon=horizon, **changes)).recorded(ks, horizon)


@st.composite
def recordeds(draw, least: int = 1, most: int = 12) -> Recorded:
    """Small recordings of all kinds."""
    g = draw(st.integers(2, 4))
    horizon = draw(st.integers(3, 6))
    actions = st.lists(st.sampled_from("ab"), min_size=1, max_size=horizon)
    rewards = st.sampled_from([0.0, 0.5, 1.0])
    members = st.builds(Member, actions=actions, observations=st.none(), reward=rewards)
    groups = [
        TrajectoryGroup(key=f"{i:02}", members=draw(st.lists(members, min_size=g, max_size=g)))
        for i in range(draw(st.integers(least, most)))
    ]
    return Trajectories.of_groups(groups).recorded(draw(st.sets(st.integers(1, horizon - 1), min_size=1)) | {1}, horizon)


# ---------------------------------------------------------------- files


def rows_of(groups: Iterable[TrajectoryGroup]) -> list[dict[str, Any]]:
    """One row per trajectory."""
    return [
        {
            "group": group.key,
            "member": index,
            "actions": list(member.actions),
            "reward": member.reward,
            "task_type": group.task_type,
            **({} if member.observations is None else {"observations": list(member.observations)}),
        }
        for group in groups
        for index, member in enumerate(group.members)
    ]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as a file of the format that its name says."""
    if path.suffix == ".csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def features_of(recorded: Recorded) -> list[dict[str, Any]]:
    """One row per group and K."""
    rows = []
    for k, groups in recorded.steps.items():
        for i, key in enumerate(recorded.keys):
            signals = {name: float(column[i]) for name, column in groups.signals.items()}
            rows.append({"group": key, "K": k, **signals, "reward_var": float(groups.reward_var[i]), "lengths": groups.lengths[i].tolist()})
    return rows


def record(folder: Path, groups: Sequence[TrajectoryGroup], identity: str = "a run", group_size: int | None = None, **changes: Any) -> Path:
    """A run folder with these groups; `changes`: by position, other values of a group's record."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(groups[0].members) if group_size is None else group_size
    recorder = RolloutRecorder(folder / "rollouts", {"identity": identity, "group_size": size})
    for i, group in enumerate(groups):
        rollouts = [_rollout(i, index, member, group.task_type) for index, member in enumerate(group.members)]
        for rollout in rollouts:
            recorder.member(rollout)
        recorder.group(
            make_record(i, **changes.get(f"of_{i}", {})), [(rollout, rollout.reward is not None) for rollout in rollouts], is_whole=True
        )
    recorder.close()
    return folder


def _rollout(group_id: int, index: int, member: Member, task_type: str | None) -> Rollout:
    from dataclasses import replace

    seen = member.observations or [""] * len(member.actions)
    turns = tuple(
        replace(make_turn(), action=action, observation=observation) for action, observation in zip(member.actions, seen, strict=True)
    )
    plain = make_rollout(reward=member.reward, attempt_id=100 * group_id + index, group_id=group_id, member_index=index)
    return replace(plain, turns=turns, task_type=task_type)
