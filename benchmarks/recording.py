"""What it costs to record rollouts: bytes on disk, and processor time on the event loop and in the recorder's own thread.

    python benchmarks/recording.py [--episodes 125] [--members 8] [--turns 30] [--words 0]

Trajectories are games of the household twin, played by its expert with every second action drawn at random, so that siblings see the same
first observation and often the same later ones. Tokens are pieces of up to four letters with numbers below 32,768, log-probs are random.
`--words` puts so many random words of thought before each action. A second line is single responses of 256 tokens.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
import zlib
from pathlib import Path
from time import process_time, thread_time

import numpy as np

from sluice.environments.household.expert import Expert
from sluice.environments.household.generator import seeded_game
from sluice.environments.household.twin import House
from sluice.records import RolloutRecorder, read_rollouts
from sluice.records.rollout_parts import Row, schema_with, to_batch
from sluice.scheduler.events import GroupRecord
from sluice.types import Rollout, TokenIds, Turn

VOCABULARY = 32_768
GROUPS_AT_ONCE = 16  # leave together, as those of a batch do


def tokens(text: str) -> TokenIds:
    """About as many as a tokenizer makes of it, the same for the same text."""
    pieces = re.findall(r"\s?\w{1,4}|\s?[^\w\s]", text)
    return np.array([zlib.crc32(piece.encode()) % VOCABULARY for piece in pieces], dtype=np.int64)


def turn(rng: np.random.Generator, prompt: str, text: str, observation: str, action: str | None, reward: float | None) -> Turn:
    sampled = tokens(text)
    return Turn(
        prompt_ids=tokens(prompt),
        token_ids=sampled,
        inference_logprobs=-rng.exponential(0.5, len(sampled)).astype(np.float32),
        text=text,
        finish_reason="stop",
        policy_version=3,
        observation=observation,
        action=action,
        is_admissible=None if action is None else True,
        reward=reward,
    )


def trajectory(group_id: int, member: int, turns: int, words: int) -> Rollout:
    draw, rng = random.Random(group_id * 1000 + member), np.random.default_rng(group_id * 1000 + member)
    game = seeded_game(group_id, size="small")
    house = House(game)
    expert = Expert(house)
    known = sorted({word for command in house.admissible() for word in command.split()} | {f"word{n}" for n in range(2_000)})
    observation, made = game.intro, []
    for number in range(turns):
        action = expert.act() if number % 2 else draw.choice(house.admissible())
        thought = " ".join(draw.choices(known, k=words)) + "\n" if words else ""
        made.append(turn(rng, f"{observation}\n>", f" {thought}{action}", observation, action, 0.0))
        observation = house.step(action)
    return rollout(group_id, member, tuple(made), draw.random() < 0.5)


def response(group_id: int, member: int, length: int) -> Rollout:
    draw, rng = random.Random(group_id * 1000 + member), np.random.default_rng(group_id * 1000 + member)
    prompt = " ".join(random.Random(group_id).choices([f"word{n}" for n in range(2_000)], k=40))
    text = " ".join(draw.choices([f"w{n}" for n in range(500)], k=length))
    return rollout(group_id, member, (turn(rng, prompt, text, "", None, None),), draw.random() < 0.5)


def rollout(group_id: int, member: int, turns: tuple[Turn, ...], is_won: bool) -> Rollout:
    return Rollout(
        attempt_id=group_id * 100 + member,
        group_id=group_id,
        member_index=member,
        task_id=f"household/g{group_id % 128}/e{group_id}",
        turns=turns,
        finish_reason="completed" if len(turns) > 1 else "stop",
        reward=float(is_won),
        metrics={"progress": 0.5},
        seconds=12.5 + member,
        env_id=f"game-{group_id}",
        task_type="pick_and_place",
    )


def measure(name: str, groups: list[list[Rollout]]) -> None:
    folder = Path(tempfile.mkdtemp()) / "rollouts"
    recorder = RolloutRecorder(folder, {"identity": "benchmark"})
    count = sum(map(len, groups))
    begun, on_loop = process_time(), 0.0
    for number, members in enumerate(groups):
        of_group, started = record(number, members), thread_time()
        for member in members:
            recorder.member(member)
        recorder.group(of_group, [(member, True) for member in members], is_whole=True)
        on_loop += thread_time() - started
        if number % GROUPS_AT_ONCE == GROUPS_AT_ONCE - 1:
            recorder.flush()
    recorder.close()
    in_thread = process_time() - begun - on_loop
    size = sum(path.stat().st_size for path in folder.iterdir())
    parts = len(list(folder.iterdir()))
    begun = process_time()
    read = sum(len(group.members) for group in read_rollouts(folder))
    reading = process_time() - begun
    assert read == count
    sampled = sum(member.sampled_tokens for members in groups for member in members)
    prompts = sum(len(turn.prompt_ids) for members in groups for member in members for turn in member.turns)
    print(
        f"{name}: {count} rollouts ({sampled / count:.0f} sampled tokens, {prompts / count:.0f} of prompts each), {parts} parts\n"
        f"  on disk        {size / count / 1e3:8.2f} kB each, {size / count / 1e3:.2f} MB per 1,000\n"
        f"  on the loop    {on_loop / count * 1e6:8.1f} us each\n"
        f"  in its thread  {in_thread / count * 1e6:8.1f} us each\n"
        f"  reading        {reading / count * 1e6:8.1f} us each"
    )
    shutil.rmtree(folder.parent)


def record(group_id: int, members: list[Rollout]) -> GroupRecord:
    return GroupRecord(
        group_id=group_id,
        task_id=members[0].task_id,
        domain="household",
        epoch=0,
        round=1,
        start_step=group_id // 16,
        end_step=group_id // 16,
        outcome="trained",
        reason="kept",
        category=None,
        source="std_filter",
        attempts=len(members),
        sampled_tokens=sum(member.sampled_tokens for member in members),
        seconds=20.0,
        policy_version=3,
        rewards=tuple(member.reward for member in members),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=125)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--words", type=int, default=0)
    given = parser.parse_args()
    to_batch([Row(record(0, [response(0, 0, 1)]), response(0, 0, 1), True, True)], schema_with({}))  # pyarrow looks for pandas once
    sizes = range(given.episodes), range(given.members)
    measure("trajectories", [[trajectory(g, m, given.turns, given.words) for m in sizes[1]] for g in sizes[0]])
    measure("responses", [[response(g, m, 85) for m in sizes[1]] for g in sizes[0]])


if __name__ == "__main__":
    main()
