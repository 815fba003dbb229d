"""Trajectories with the slot engine and a tiny model: log-probs of the trained rows are those of an ordinary forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice.generation.slot import SlotEngine
from sluice.trainer.assemble import samples_from_batch
from sluice.types import Batch, Sample
from tests.execution.playing import World, config, rollouts, world
from tests.fakes import ScriptedEnvironment
from tests.generation import tiny


class LetterTokenizer:
    """Any text in the 64 tokens of a tiny model, and back to other letters."""

    eos_token_id = tiny.END
    all_special_tokens = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(letter) % 62 for letter in text]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tiny.qwen2(), tmp_path_factory.mktemp("models") / "qwen2")


@torch.no_grad()
def log_probs(models: list[Any], sample: Sample) -> Any:
    """Of every completion token, from one pass over the whole row, by the version that sampled it. [T]"""
    row = np.concatenate([sample.prompt_ids, sample.completion_ids])
    versions = np.full(len(sample.completion_ids), sample.policy_version) if sample.token_versions is None else sample.token_versions
    at = slice(len(sample.prompt_ids) - 1, -1)
    chosen = torch.from_numpy(sample.completion_ids)[:, None]
    by_version = [
        torch.log_softmax(model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, at].double(), -1).gather(1, chosen)[:, 0]
        for model in models
    ]
    return np.array([by_version[max(version, 0)][index].item() for index, version in enumerate(versions)])


def assert_exact(models: list[Any], batch: Batch) -> None:
    for sample in samples_from_batch(batch):
        sampled = sample.loss_mask if sample.is_counted else np.zeros(0, dtype=bool)
        if len(sampled):
            np.testing.assert_allclose(sample.inference_logprobs[sampled], log_probs(models, sample)[sampled], atol=2e-5, rtol=0)


SETTINGS: dict[str, Any] = {"sequence_length": 120, "dialogue": {"max_tokens_per_turn": 10}}


@pytest.mark.parametrize("slots", [2, 16])
def test_trained_rows_have_the_log_probs_of_a_full_forward_pass_and_every_token_is_counted(model_path: Path, slots: int) -> None:
    async def main() -> None:
        chosen = config(train_env_manager={"num_env_groups": 2, "group_size": 3, "group_size_redundancy": 2}, **SETTINGS)
        with SlotEngine.load(model_path, max_slots=slots, max_length=120, threads=1) as engine:
            async with world(lambda: ScriptedEnvironment(length=4), engine, chosen, tokenizer=LetterTokenizer(), truncated="keep") as one:
                one.advance = lambda: next_step(one, tiny.qwen2())  # type: ignore[method-assign]
                for _ in range(2):
                    batch = await one.batch()
                    assert [len(group.rollouts) for group in batch.groups] == [3, 3]
                    assert_exact([tiny.qwen2()] * 3, batch)
                    assert {rollout.finish_reason for rollout in rollouts(batch)} <= {"max_turns", "length"}

    asyncio.run(main())


def next_step(one: World, model: Any) -> None:
    one.step += 1
    one.engine.publish(model.state_dict(), one.step)
    one.shell.step_advanced(one.step)


@pytest.mark.parametrize("rule", ["finish", "continue", "restart"])
def test_weights_that_change_in_the_middle_of_trajectories_sample_what_their_version_says(model_path: Path, rule: str) -> None:
    async def main() -> None:
        models = [tiny.qwen2(), tiny.perturbed(tiny.qwen2(), 0.3)]
        chosen = config(on_weight_update=rule, **SETTINGS)
        with SlotEngine.load(model_path, max_slots=8, max_length=120, threads=1, on_weight_update=rule) as engine:  # type: ignore[arg-type]
            async with world(lambda: ScriptedEnvironment(length=4), engine, chosen, tokenizer=LetterTokenizer(), truncated="keep") as one:
                waiting = asyncio.create_task(one.shell.next_batch(2), name="batch")
                while not waiting.done() and sum(one.player.in_flight().values()) < 60:  # noqa: ASYNC110 - an engine in its own thread
                    await asyncio.sleep(0)
                await asyncio.to_thread(engine.publish, models[1].state_dict(), 1)
                one.shell.weights_updated(1)
                batch, _ = await waiting
                one.shell.step_advanced(1)
                one.step = 1
                assert_exact(models, batch)
                versions = {turn.policy_version for rollout in rollouts(batch) for turn in rollout.turns}
                assert versions == ({1} if rule == "restart" else {0, 1})

    asyncio.run(main())
