"""A short run for two processes, as `torchrun` starts them: each writes down what it trained on. Arguments: model, output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from sluice.integrations.trl import DynamicSampling
from tests.integrations.tiny import LETTERS, make, rewards_by_prompt, steps

ROWS = 2  # of each process: a group of four lies across both
SAME_FOR_HALF = {letter: [1, 1, 1, 1] for letter in LETTERS[::2]}


def main(folder: Path, output: Path) -> None:
    """One run with replaced groups and replaced completions."""
    torch.set_num_threads(1)
    own: list[str] = []

    def reward(prompts: list[str], **_: Any) -> list[float]:
        own.extend(prompts)
        return rewards_by_prompt(SAME_FOR_HALF)(prompts)

    trainer = make(
        folder,
        output,
        reward_funcs=reward,
        settings=DynamicSampling(response_filter={"type": "length", "filter_args": {"min_tokens": 2}}, max_response_rounds=9),
        args={"per_device_train_batch_size": ROWS, "ddp_find_unused_parameters": False},
    )
    trainer.train()
    rank = trainer.accelerator.process_index
    seen = {
        "processes": trainer.accelerator.num_processes,
        "prompts": trainer.seen.prompts,
        "advantages": [output["advantages"].tolist() for output in trainer.seen.outputs],
        "lengths": [output["completion_mask"].sum(1).tolist() for output in trainer.seen.outputs],
        "scored": len(own),
        "log": steps(trainer),
        "ledger": trainer.batch_sampler.machine.ledger.state_dict(),
        "weights": [float(weights.double().sum()) for weights in trainer.model.state_dict().values()],
    }
    (output / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
