"""Make the small policy from which `sluice train recipes/rlvr_arithmetic.yaml` starts.

A Qwen2-architecture model of 0.65M parameters is trained on right answers to two kinds of sums and stopped early, at its full learning
rate: right often enough for groups to hold both outcomes, wrong often enough to learn. No validation task of the recipe is trained on, in
either phrasing, and the number of steps was chosen on probe tasks of their own.

    python recipes/rlvr_arithmetic/warm_start.py --out recipes/rlvr_arithmetic/model
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the recipes share lies beside their folders
from starting_policy import PAD, UNK, build_model, build_optimizer, optimizer_step, pretrained

log = logging.getLogger("warm_start")

EOS: Final = "<eos>"
PHRASES: Final = ("State the final answer to the following arithmetic problem: ", "Calculate ", " + ", " - ", " =")
CHARACTERS: Final = (*(chr(code) for code in range(ord(" "), ord("~") + 1)), "\n")  # printable ASCII: no text is lost
IGNORED: Final = -100  # label of positions without loss, torch's default ignore_index
MAX_POSITIONS: Final = 128  # the longest prompt has 13 tokens, the longest answer 5 with eos; the rest is for other templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where one domain's tasks come from. reasoning-gym makes item i from seed + i: seeds lie further apart than sizes."""

    name: str  # reasoning-gym data set
    params: dict[str, Any]
    validation_seed: int  # as in the recipe
    validation_size: int
    warm_start_seed: int
    probe_seed: int


SOURCES: Final = (
    Source(
        name="basic_arithmetic",
        params={"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False},
        validation_seed=11_000_000,
        validation_size=600,
        warm_start_seed=12_000_000,
        probe_seed=13_000_000,
    ),
    Source(
        name="chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        validation_seed=21_000_000,
        validation_size=600,
        warm_start_seed=22_000_000,
        probe_seed=23_000_000,
    ),
)
WARM_START_SIZE: Final = 40_000  # tasks per domain
PROBE_SIZE: Final = 300
BATCH_SIZE: Final = 128
STEPS: Final = 1200
WARM_UP_STEPS: Final = 100
LEARNING_RATE: Final = 2e-3  # constant after the warm-up: decaying it would bring the skill that is left for RL
PROBE_EVERY: Final = 200


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per stock phrase, else per character: a prompt has 7 to 13 tokens and decoding gives the text back."""
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNK, *PHRASES, *CHARACTERS))}
    phrases = "|".join(phrase.replace("+", r"\+") for phrase in sorted(PHRASES, key=len, reverse=True))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{phrases}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return pretrained(tokenizer, end=EOS, positions=MAX_POSITIONS)


def expression(entry: dict[str, Any]) -> str:
    """The sum without its phrasing: `3 + 4 - 1` is the same task in both domains."""
    return str(entry["metadata"]["expression"])


def draw(source: Source, seed: int, size: int, excluded: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Entries of one reasoning-gym data set whose expression is not among the excluded ones."""
    unwanted = set(excluded)
    entries = reasoning_gym.create_dataset(source.name, seed=seed, size=size, **source.params)
    return [entry for entry in entries if expression(entry) not in unwanted]


def supervised_batch(examples: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [B, T], padded on the right; only answer and eos carry loss."""
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full((len(examples), length), IGNORED)
    for row, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, entries: Sequence[dict[str, Any]], *, sampled: bool) -> float:
    """Share of answers that are exactly the reference, greedy or sampled at temperature 1."""
    inputs = tokenizer([entry["question"] for entry in entries], padding=True, return_tensors="pt")
    longest = max(len(entry["answer"]) for entry in entries) + 2  # eos, and one token by which a wrong answer may be longer
    output = model.eval().generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=longest,
        do_sample=sampled,
        top_k=0 if sampled else None,
    )
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(answer == entry["answer"] for answer, entry in zip(answers, entries, strict=True)) / len(entries)


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    """Supervised training on right answers with AdamW; the loss is averaged over answer tokens."""
    rng = random.Random(seed)
    held_out = {expression(entry) for source in SOURCES for entry in draw(source, source.validation_seed, source.validation_size)}
    probes = [draw(source, source.probe_seed, PROBE_SIZE, held_out) for source in SOURCES]
    held_out |= {expression(entry) for entries in probes for entry in entries}
    entries = [entry for source in SOURCES for entry in draw(source, source.warm_start_seed, WARM_START_SIZE, held_out)]
    examples = [
        (tokenizer(entry["question"])["input_ids"], [*tokenizer(str(entry["answer"]))["input_ids"], tokenizer.eos_token_id])
        for entry in entries
    ]
    optimizer = build_optimizer(model, LEARNING_RATE)
    started = time.monotonic()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP_STEPS)
        ids, labels = supervised_batch(rng.sample(examples, BATCH_SIZE))
        hidden = model.train().model(input_ids=ids).last_hidden_state[:, :-1]
        trained = labels[:, 1:] != IGNORED  # [B, T-1]
        loss = nn.functional.cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        loss.backward()
        optimizer_step(model, optimizer)
        if step % PROBE_EVERY == 0:
            probed = [round(accuracy(model, tokenizer, entries, sampled=sampled), 3) for sampled in (False, True) for entries in probes]
            names = [f"{source.name} {how}" for how in ("greedy", "sampled") for source in SOURCES]
            found = ", ".join(f"{name} {value}" for name, value in zip(names, probed, strict=True))
            log.info("step %d, %.0f s, loss %.3f; probes: %s", step, time.monotonic() - started, loss.item(), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings, and one thread gives the same sums every time
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.seed, arguments.steps)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
