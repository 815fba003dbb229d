"""Real runs of the real command, killed with SIGKILL again and again and resumed until they finish.

Every run is a process of its own (`processes.py`). The moments are drawn from a seed: shares of
an undisturbed run's duration, or the appearance of a file, from the lock of the run folder to the trained model. Whoever wants other
moments sets SLUICE_KILL_SEED.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.config import load_config
from sluice.errors import RecordError
from sluice.generation.tokenizer import load_tokenizer
from sluice.records import Checkpoints, RunFolder, open_for_reading, read_facts, read_metrics, read_status, read_summary
from sluice.tasks import build_tasks
from tests.pipeline.processes import MOST_S, Process, Zygote
from tests.pipeline.test_rlvr import write_recipe

SEED = os.environ.get("SLUICE_KILL_SEED", "1")
KILLS_PER_RATIO = 14
CHAINS_AT_ONCE = 2

GROUPS, STEPS = 3, 12
SETTINGS: dict[str, Any] = {
    "rows": 60,
    "rollout_batch_size": GROUPS,
    "num_return_sequences_in_group": 4,
    "engine__max_slots": 8,
    "trainer": {"max_steps": STEPS, "learning_rate": 2e-4, "lr_scheduler_type": "linear", "torch_threads": 1},
    "trainer__keep_checkpoints": 2,
    "validation": {"every_steps": 4, "max_items": 10},
    "resampling__max_resample_rounds": 50,
}
IN_PLACE: dict[str, Any] = {  # scored without worker processes that a kill could leave behind: such a run begins twice as fast
    "reward_pool": {"workers": 0},
    "rewards": {"letters": {"verifier": {"type": "tests.pipeline.verifiers.begins_with_a"}, "query_filter_config": {"type": "std_filter"}}},
}
VARIETY: dict[str, Sequence[Any]] = {  # of asynchronous chains
    "on_weight_update": ["finish", "restart", "continue"],
    "resampling__collect": ["as_finished", "in_order"],
    "group_size_redundancy": [0, 1],
}


# ---------------------------------------------------------------- moments


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a process is killed: a while after its start, or after a file appeared or changed for the n-th time in this process."""

    share: float  # of the duration of an undisturbed run
    file: str | None = None  # pattern inside the run folder
    times: int = 1


FILES: Sequence[tuple[str, int, float]] = (  # pattern, most times, most share afterwards
    ("run.lock", 1, 0.4),  # starting, or resuming
    ("run.db", 1, 0.1),
    ("metrics.jsonl", 6, 0.05),  # a step is done
    ("checkpoints/checkpoint-*", 4, 0.01),  # a checkpoint is being written
    ("checkpoints/checkpoint-*/optimizer.pt", 4, 0.01),
    ("checkpoints/checkpoint-*/sluice_state*.json", 4, 0.005),
    ("checkpoints/checkpoint-*/sluice_manifest.json*", 4, 0.005),
    ("model/*", 2, 0.1),  # the end: the trained model, the last evaluation
)


def draw_moments(rng: random.Random, count: int) -> list[Moment]:
    files = [FILES[i % len(FILES)] for i in rng.sample(range(len(FILES)), len(FILES))]
    moments = []
    for i in range(count):
        if i % 2:
            pattern, times, share = files[i // 2 % len(files)]
            moments.append(Moment(file=pattern, times=rng.randint(1, times), share=rng.uniform(0, share)))
        else:
            moments.append(Moment(share=rng.uniform(0, 1)))
    rng.shuffle(moments)
    return moments


def wait_for(moment: Moment, process: Process, root: Path, before: set[Any], duration_s: float) -> bool:
    """Whether it came before the process ended."""
    seen = 0
    while moment.file is not None and seen < moment.times:
        if process.ended.wait(0.002):
            return False
        now = look(root, moment.file)
        seen += bool(now - before)
        before |= now
    return not process.ended.wait(moment.share * duration_s)


def look(root: Path, pattern: str | None) -> set[Any]:
    """What lies there now: a file that has changed is another one."""
    found: set[Any] = set()
    with suppress(OSError):  # it was deleted meanwhile: the next look sees the rest
        for path in () if pattern is None else root.glob(f"*/{pattern}"):
            stat = path.stat()
            found.add((path, stat.st_ino, stat.st_mtime_ns if path.is_file() else 0))
    return found


# ---------------------------------------------------------------- chains


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a later process had to go on from."""

    step: int
    engine_tokens: int
    next_group: int
    open_groups: frozenset[int]
    committed: Mapping[int, tuple[str, int, list[float]]]  # group_id -> task, epoch, rewards


@dataclass(kw_only=True)
class Chain:
    """One run, from its start to its end, over any number of processes."""

    recipe: Path
    root: Path
    moments: list[Moment] = field(default_factory=list)  # at which its processes were killed
    used: list[Checkpoint] = field(default_factory=list)  # after each kill
    tokens: list[int] = field(default_factory=list)  # known after each kill
    is_over: bool = False  # it was killed after its end had been written down

    @property
    def folder(self) -> Path | None:
        """Of the run; None: no process has got so far."""
        made = [path for path in self.root.glob("*/run.db") if is_run(path)]
        assert len(made) <= 1
        return made[0].parent if made else None

    def play(self, runs: Zygote, moments: list[Moment], duration_s: float) -> None:
        """Kill at the first moments of the list, which are taken out, and resume, until it finishes."""
        for number in itertools.count():
            folder = self.folder
            args = ["train", str(self.recipe), f"records.root={self.root}"] if folder is None else ["train", "--resume", str(folder)]
            moment = moments[0] if moments else None
            before = look(self.root, moment.file if moment else None)
            process = runs.run(self.root.with_name(f"{self.root.name}-{number}.txt"), *args, "--quiet")
            if moment is None:
                process.ended.wait(MOST_S)
            elif wait_for(moment, process, self.root, before, duration_s):
                runs.kill(process)
                assert process.ended.wait(MOST_S)
                if process.code == -9:
                    self.moments.append(moments.pop(0))
                    self._killed()
                    if self.is_over:
                        return
                    continue
            if not process.ended.is_set():
                runs.kill(process, signal.SIGUSR1)
                process.ended.wait(1.0)
                left = [(one.pid, one.ppid(), one.status(), one.cmdline()[-3:]) for one in runs.descendants()]
                pytest.fail(f"no end after {MOST_S} s: {process.told()}\n{left}")
            assert process.code == 0, f"exit code {process.code}: {process.told()}"
            if moment is not None:  # it did not come in time, or was too short to be seen
                moments[0] = Moment(share=moment.share / 2)
            return

    def _killed(self) -> None:
        folder = self.folder
        if folder is None:
            return
        status = read_status(folder / "run.db", time.time())
        deadline = time.monotonic() + MOST_S
        while status.state == "running" and time.monotonic() < deadline:  # a child that it was just starting has a copy of its lock yet
            time.sleep(0.01)
            status = read_status(folder / "run.db", time.time())
        self.is_over = status.state == "finished"
        assert status.state == "killed" or (self.is_over and status.step == STEPS)
        found = Checkpoints(folder / "checkpoints", RunFolder.open(folder).identity, 2).newest()
        known = int(read_facts(folder / "run.db").get("engine_tokens", 0))
        self.tokens.append(max(known, 0 if found is None else found[2]["engine_tokens"]))
        if found is not None:
            scheduler = found[2]["shell"]["scheduler"]
            self.used.append(
                Checkpoint(
                    step=found[0],
                    engine_tokens=found[2]["engine_tokens"],
                    next_group=scheduler["next_group"],
                    open_groups=frozenset(scheduler["open_groups"]),
                    committed={
                        group["group_id"]: (group["task_id"], group["epoch"], [rollout["reward"] for rollout in group["rollouts"]])
                        for group in scheduler["committed"]
                    },
                )
            )


def is_run(run_db: Path) -> bool:
    """False: its process was killed while it made the folder."""
    try:
        RunFolder.open(run_db.parent)
    except RecordError:
        with closing(sqlite3.connect(run_db)) as db:
            assert db.execute("SELECT name FROM sqlite_master").fetchall() == []
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Group:
    """A row of the table."""

    group_id: int
    task_id: str
    epoch: int
    outcome: str
    reason: str
    start_step: int
    end_step: int
    tokens: int
    rewards: list[float | None]


@dataclass(frozen=True, kw_only=True)
class Story:
    """What run.db says of a run."""

    groups: dict[int, Group]
    batches: list[list[int]]  # ids by step
    validation: list[tuple[Any, ...]]
    ledgers: list[tuple[int, int]]  # (step, all tokens)
    tokens: dict[str, int]  # by outcome, at the end
    facts: dict[str, Any]

    def trained(self) -> list[list[tuple[Any, ...]]]:
        """By step, what a batch was made of."""
        kept = [[self.groups[group_id] for group_id in ids] for ids in self.batches]
        return [[(group.task_id, group.epoch, group.rewards, group.tokens, group.start_step) for group in batch] for batch in kept]


def read_story(folder: Path) -> Story:
    with open_for_reading(folder / "run.db") as db:
        columns = "group_id, task_id, epoch, outcome, reason, start_step, end_step, sampled_tokens, rewards"
        names = ("group_id", "task_id", "epoch", "outcome", "reason", "start_step", "end_step", "tokens")
        groups = [
            Group(**dict(zip(names, row[:-1], strict=True)), rewards=json.loads(row[-1]))
            for row in db.execute(f"SELECT {columns} FROM groups ORDER BY group_id")
        ]
        batches = db.execute("SELECT step, requested, kept, group_ids FROM batches ORDER BY rowid").fetchall()
        assert [(step, requested, kept) for step, requested, kept, _ in batches] == [(i + 1, GROUPS, GROUPS) for i in range(STEPS)]
        assert db.execute("SELECT message FROM events WHERE level = 'error'").fetchall() == []
        assert db.execute("SELECT step, name FROM metrics GROUP BY 1, 2 HAVING count(*) > 1").fetchall() == []
        validation = "SELECT evaluation, step, domain, items, scored, mean, reward_sum, truncated, sampled_tokens FROM validation"
        ledger = "SELECT step, sum(tokens) FROM ledger GROUP BY step ORDER BY step"
        last = "SELECT outcome, tokens FROM ledger WHERE step = (SELECT max(step) FROM ledger)"
        return Story(
            groups={group.group_id: group for group in groups},
            batches=[json.loads(ids) for _, _, _, ids in batches],
            validation=db.execute(validation).fetchall(),
            ledgers=db.execute(ledger).fetchall(),
            tokens=dict(db.execute(last).fetchall()),
            facts={key: json.loads(value) for key, value in db.execute("SELECT key, value FROM run")},
        )


# ---------------------------------------------------------------- what must hold


def check_every_chain(chain: Chain, story: Story, draws: Sequence[tuple[str, int]], ratio: float) -> None:
    assert chain.folder is not None
    assert story.facts["status"] == "finished"
    check_tokens(chain, story)
    check_prompts(chain, story, draws)
    trained = [group_id for batch in story.batches for group_id in batch]
    assert sorted(trained) == [group.group_id for group in story.groups.values() if group.outcome == "trained"]
    for step, batch in enumerate(story.batches, start=1):
        assert all(0 <= step - 1 - story.groups[group_id].start_step <= math.ceil(ratio) for group_id in batch)
    for checkpoint in chain.used:
        for group_id, saved in checkpoint.committed.items():
            group = story.groups[group_id]
            assert (group.task_id, group.epoch, [reward for reward in group.rewards if reward is not None]) == saved
            assert group.outcome in ("trained", "expired", "discarded")
    lines = [line["step"] for line in read_metrics(chain.folder / "metrics.jsonl") if "actor/loss" in line]
    assert lines == list(range(1, STEPS + 1))
    assert list((chain.folder / "model").glob("*model.safetensors"))


def check_tokens(chain: Chain, story: Story) -> None:
    total = sum(story.tokens.values())
    assert total == story.facts["engine_tokens"] == read_summary(chain.root / story_name(chain) / "run.db").tokens
    assert min(story.tokens.values()) >= 0
    assert story.tokens["open"] == 0
    assert sum(group.tokens for group in story.groups.values()) + story.tokens["late"] + story.tokens["lost"] == total
    assert [*chain.tokens, total] == sorted([*chain.tokens, total]), "tokens that had been paid for are forgotten"
    totals = [tokens for _, tokens in story.ledgers]
    assert totals == sorted(totals)


def story_name(chain: Chain) -> str:
    assert chain.folder is not None
    return chain.folder.name


def check_prompts(chain: Chain, story: Story, draws: Sequence[tuple[str, int]]) -> None:
    """Each prompt was judged once, unless the run ended before; none was passed over."""
    of_prompt: dict[tuple[str, int], list[Group]] = defaultdict(list)
    for group in story.groups.values():
        of_prompt[group.task_id, group.epoch].append(group)
    assert set(of_prompt) == set(draws[: len(of_prompt)])
    for prompt, groups in of_prompt.items():
        *earlier, last = groups
        assert all(group.outcome in ("cancelled", "expired") for group in earlier), f"{prompt} was used twice: {groups}"
        if last.reason == "restart":  # its turn did not come again: nor did that of any new prompt
            resumed_at = min(one.next_group for one in chain.used if last.group_id in one.open_groups)
            assert all(of_prompt[group.task_id, group.epoch][0].group_id < resumed_at for group in story.groups.values()), (
                f"{prompt} is lost"
            )
        elif last.outcome == "cancelled":
            assert last.reason == "shutdown"


@pytest.mark.timeout(600)  # it takes a fraction of that, unless the machine is busy with other things
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
def test_a_run_that_is_killed_at_any_moment_goes_on_and_loses_nothing(tmp_path: Path, model: Path, runs: Zygote, ratio: float) -> None:
    chains = itertools.count()

    def new_chain(rng: random.Random) -> Chain:
        folder = tmp_path / f"{next(chains)}"
        folder.mkdir()
        variety = {name: rng.choice(values) for name, values in VARIETY.items()} if ratio else {}
        changes = deepcopy(SETTINGS) | {"async_generation_ratio": ratio, "trainer__save_every_steps": rng.choice([1, 2])} | variety
        changes |= {} if rng.choice([True, False]) else IN_PLACE
        (folder / "runs").mkdir()
        return Chain(recipe=write_recipe(folder, model, **changes), root=folder / "runs")

    undisturbed = new_chain(random.Random(SEED))
    started = time.monotonic()
    undisturbed.play(runs, [], 0)
    duration_s = time.monotonic() - started
    config = load_config(undisturbed.recipe)
    source = build_tasks(config, load_tokenizer(config.model.path)).train
    drawn = [source.draw() for _ in range(2_000)]
    draws = [(task.task_id, epoch) for task, epoch in (one for one in drawn if one is not None)]
    assert undisturbed.folder is not None
    told = read_story(undisturbed.folder)
    check_every_chain(undisturbed, told, draws, ratio)

    def play(worker: int) -> int:
        rng = random.Random(f"{SEED} {ratio} {worker}")
        moments = draw_moments(rng, KILLS_PER_RATIO // CHAINS_AT_ONCE)
        kills = 0
        while moments:
            chain = new_chain(rng)
            try:
                chain.play(runs, moments, duration_s)
                assert chain.folder is not None
                story = read_story(chain.folder)
                check_every_chain(chain, story, draws, ratio)
                if not ratio:
                    assert undisturbed.folder is not None
                    assert story.trained() == told.trained()
                    assert story.validation == told.validation
                    weights = [folder / "model" / "model.safetensors" for folder in (chain.folder, undisturbed.folder)]
                    assert weights[0].read_bytes() == weights[1].read_bytes()
            except BaseException as error:
                error.add_note(f"SLUICE_KILL_SEED={SEED}, ratio {ratio}, worker {worker}, undisturbed {duration_s:.1f} s: {chain}")
                raise
            kills += len(chain.moments)
            shutil.rmtree(chain.root.parent)
        return kills

    with ThreadPoolExecutor(CHAINS_AT_ONCE) as pool:
        assert sum(pool.map(play, range(CHAINS_AT_ONCE))) == KILLS_PER_RATIO
