"""The gate in a rollout function of several turns: converged groups are stopped on the way and replaced, and never scored or trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from sluice.errors import ConfigError, TrainerError
from sluice.gate import Gate, GateKeeper
from sluice.integrations.trl import DynamicRollout, DynamicSampling
from tests.integrations.tiny import LETTERS, make, steps

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HORIZON, K = 6, 2
TOGETHER = set(LETTERS[::2])  # problems whose members all do the same
ALWAYS = GateKeeper(Gate(k=K, threshold=0.5, horizon=HORIZON), group_size=4, audit_rate=0.0)


class Corridor:
    """A rollout function: each member walks, and is stopped as soon as nobody waits for it. `short`: members that leave at once."""

    def __init__(self, short: Sequence[int] = ()) -> None:
        self.short = short
        self.walked: dict[str, list[int]] = {}
        self.scored: list[str] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        watch = trainer.rollout_watch if hasattr(trainer, "rollout_watch") else self.watch()
        lengths = [0] * len(prompts)
        running = list(range(len(prompts)))
        for step in range(HORIZON):
            for row in [row for row in running if not watch.is_cut(row)]:
                if row % 4 in self.short and step:
                    watch.ended(row)
                    running.remove(row)
                    continue
                action = "on" if prompts[row][0] in TOGETHER else f"{row % 4}"
                watch.step(row, action, f"door {step}")
                lengths[row] += 1
            running = [row for row in running if not watch.is_cut(row)]
        for prompt, length in zip(prompts, lengths, strict=True):
            self.walked.setdefault(prompt, []).append(length)
        ids = [[LETTERS.index(letter) + 2 for letter in prompt] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": [[2] * length for length in lengths], "logprobs": [[-1.0] * n for n in lengths]}

    def won(self, prompts: list[str], **_: Any) -> list[float]:
        self.scored.extend(prompts)
        return [float(row % 2) for row in range(len(prompts))]

    def watch(self) -> Any:
        return self.dynamic.rollout_watch

    dynamic: DynamicRollout


def run(folder: Path, output: Path, corridor: Corridor, gate: Any, **settings: Any) -> Any:
    sampling = DynamicSampling(query_filter={"type": "no_filter"}, gate=gate, **settings)
    trainer = make(folder, output, reward_funcs=corridor.won, rollout_func=corridor, settings=sampling, args={"max_steps": 2})
    trainer.train()
    return trainer


def fresh() -> GateKeeper:
    return GateKeeper(ALWAYS.gate, group_size=4, audit_rate=0.0)


def test_groups_that_do_the_same_are_cut_at_step_k_and_replaced(model_folder: Path, tmp_path: Path) -> None:
    corridor = Corridor()
    trainer = run(model_folder, tmp_path, corridor, fresh())
    for prompts in trainer.seen.prompts:
        assert not {prompt[0] for prompt in prompts} & TOGETHER
        assert len(prompts) == 8
    for prompt, lengths in corridor.walked.items():
        assert max(lengths) == (K if prompt[0] in TOGETHER else HORIZON)
    assert not {prompt[0] for prompt in corridor.scored} & TOGETHER
    logged = steps(trainer)[-1]
    cut = sum(lengths for prompt, all_lengths in corridor.walked.items() if prompt[0] in TOGETHER for lengths in all_lengths)
    assert logged["gate/cut"] > 0
    assert logged["ledger/tokens/cut"] == cut
    assert logged["ledger/tokens/total"] == cut + logged["ledger/tokens/trained"]
    assert logged["gate/env_steps_saved_bound"] > 0


def test_members_that_end_early_are_compared_and_do_not_hold_the_decision_up(model_folder: Path, tmp_path: Path) -> None:
    corridor = Corridor(short=[3])
    trainer = run(model_folder, tmp_path, corridor, GateKeeper(Gate(k=3, threshold=0.4, horizon=HORIZON), group_size=4, audit_rate=0.0))
    assert steps(trainer)[-1]["gate/cut"] > 0
    assert not {prompt[0] for prompts in trainer.seen.prompts for prompt in prompts} & TOGETHER


def test_an_audited_group_runs_to_its_end_and_trains_like_any_other(model_folder: Path, tmp_path: Path) -> None:
    corridor = Corridor()
    trainer = run(model_folder, tmp_path, corridor, GateKeeper(ALWAYS.gate, group_size=4, audit_rate=1.0))
    assert {length for lengths in corridor.walked.values() for length in lengths} == {HORIZON}
    assert steps(trainer)[-1]["gate/cut"] == 0
    assert steps(trainer)[-1]["gate/would_cut"] > 0
    assert {prompt[0] for prompts in trainer.seen.prompts for prompt in prompts} & TOGETHER


def test_a_cut_group_may_leave_its_batch_smaller(model_folder: Path, tmp_path: Path) -> None:
    trainer = run(model_folder, tmp_path, Corridor(), fresh(), on_cut="drop")
    short = [step for step in steps(trainer) if step["batch/groups"] < 2]
    assert short
    assert all(step["batch/neutral_rows"] == 8 - 4 * step["batch/groups"] for step in steps(trainer))


def test_a_rollout_function_inside_another_trainer_is_gated_too(model_folder: Path, tmp_path: Path) -> None:
    corridor = Corridor()
    sampling = DynamicSampling(query_filter={"type": "no_filter"}, gate=fresh())
    corridor.dynamic = DynamicRollout(corridor.won, dynamic_sampling=sampling, rollout_func=corridor)
    trainer = make(model_folder, tmp_path, GRPOTrainer, reward_funcs=corridor.dynamic.reward_funcs, rollout_func=corridor.dynamic)
    trainer.train()
    assert steps(trainer)[-1]["gate/cut"] > 0
    assert not {prompt[0] for prompts in trainer.seen.prompts for prompt in prompts} & TOGETHER


def test_what_the_gate_needs_is_asked_for(model_folder: Path, tmp_path: Path) -> None:
    gated = DynamicSampling(gate=Gate(k=2))
    with pytest.raises(ConfigError, match="expected a rollout_func"):
        make(model_folder, tmp_path, settings=gated)
    with pytest.raises(ConfigError, match="GateKeeper for groups of 4"):
        make(model_folder, tmp_path, settings=DynamicSampling(gate=GateKeeper(Gate(k=2), group_size=8)), rollout_func=Corridor())
    with pytest.raises(ConfigError, match=r"expected a Gate, or a GateKeeper for groups of 4, got {'k': 2}"):
        make(model_folder, tmp_path, settings=DynamicSampling(gate={"k": 2}), rollout_func=Corridor())  # type: ignore[arg-type]

    def silent(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[2]] * len(prompts), "completion_ids": [[2]] * len(prompts), "logprobs": [[0.0]] * len(prompts)}

    with pytest.raises(TrainerError, match="got not a single step"):
        make(model_folder, tmp_path, settings=gated, rollout_func=silent).train()
