"""Make the small policy from which the household recipe starts.

A Qwen2-architecture model of 0.7M parameters imitates the expert of `sluice.environments.household` on the twin, in the rooms of the
training split, and is stopped early: right often enough for groups to hold both outcomes, wrong often enough to learn. The games are of
our own on real floor plans, in ALFWorld's format; they are not the published ones.

    python recipes/agentic_household/warm_start.py --out recipes/agentic_household/policy
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2ForCausalLM

from sluice.environments.household.environment import HouseholdSettings
from sluice.environments.household.expert import Expert
from sluice.environments.household.facts import LAMPS, TASK_TYPES, facts
from sluice.environments.household.game import Game, class_of
from sluice.environments.household.generator import SIZES, Split, seeded_game
from sluice.environments.household.twin import HELP, NOTHING, House

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the recipes share lies beside their folders
from starting_policy import PAD, UNK, build_model, build_optimizer, optimizer_step, pretrained

log = logging.getLogger("warm_start")

END: Final = "\n"  # an action ends with its line
CUE: Final = "\n>"  # follows every observation; what comes next is the policy's

PHRASES: Final = (
    "-= Welcome to TextWorld, ALFRED! =-",
    "You are in the middle of a room. Looking quickly around you",
    "Your task is to:",
    "You arrive at",
    ". On the",
    ". The",
    "On the",
    "The",
    ", you see nothing.",
    ", you see a",
    ", and a",
    ", a",
    "is closed.",
    "is open. In it",
    "You open the",
    "You close the",
    "You pick up the",
    "from the",
    "You move the",
    "to the",
    "You clean the",
    "You heat the",
    "You cool the",
    "using the",
    "You turn on the",
    "You sliced the",
    "with the",
    "You are carrying: a",
    "You are not carrying anything.",
    "You are facing the",
    ". Next to it",
    "There's nothing special about",
    "This is a",
    NOTHING,
    "go to",
    *(line.strip() for line in HELP.splitlines()),
)
"""One token each. They are what the twin says, so that an observation has about ten tokens."""

COMMANDS: Final = (
    "help",
    "look",
    "inventory",
    "open",
    "close",
    "take",
    "from",
    "move",
    "to",
    "examine",
    "use",
    "heat",
    "clean",
    "cool",
    "slice",
    "with",
)
STATES: Final = ("hot", "cold", "and", "sliced")
SIGNS: Final = (".", ",", ":", ">", "-", "'", "!")

MOST_POSITIONS: Final = 2048  # tokens of an episode; the longest of 30 steps in the largest room have about half
LONGEST_ACTION: Final = 16  # sampled tokens; the longest command has 5 with its line's end

STEPS: Final = 3000
BATCH_SIZE: Final = 8  # demonstrations
DRAWN_AT_ONCE: Final = 512  # demonstrations, sorted by length to make batches with little padding
WARM_UP_STEPS: Final = 100
LEARNING_RATE: Final = 2e-3
SHARE_OF_DECAY: Final = 0.2  # of the steps, the last ones: the learning rate falls to 0, for steadier weights to start RL from
SLIPS: Final = 0.15  # share of commands in demonstrations that are mistakes: not imitated, but the expert shows how to go on after them
OBSERVATION_WEIGHT: Final = 0.3  # of the loss on what the environment says: a cheap lesson in what lies where
LOG_EVERY: Final = 100

MOST_STEPS: Final = HouseholdSettings().max_steps
TEMPERATURE: Final = 0.7
GROUP: Final = 8  # episodes per game
PROBES: Final[tuple[Split, ...]] = ("train", "unseen")
PROBE_SEED: Final = 1 << 40  # far from the seeds of the demonstrations
PLAYED_AT_ONCE: Final = 64  # episodes in a batch of the sampler


def vocabulary() -> list[str]:
    """Every token, for all rooms and sizes: phrases, words, and each thing and receptacle with each number that it can have."""
    known = facts()
    numbered: Counter[str] = Counter()  # class -> highest number
    for plan in known.floor_plans.values():
        for kind, count in Counter(class_of(receptacle) for receptacle in plan.receptacles).items():
            numbered[kind] = max(numbered[kind], count)
        for kind in plan.objects:
            numbered[kind] = max(numbered[kind], 1 if kind in LAMPS else 3)  # a goal asks for up to three things in every size
    assert max(size.copies[1] for size in SIZES.values()) == 3, "and no size has more"
    templates = " ".join(template for told in known.templates.values() for template in told)
    words = [*COMMANDS, *STATES, *re.findall(r"[a-z]+", re.sub(r"\{\w+\}", "", templates)), *(kind.lower() for kind in sorted(numbered))]
    names = [f"{kind.lower()} {number}" for kind in sorted(numbered) for number in range(1, numbered[kind] + 1)]
    return list(dict.fromkeys((PAD, UNK, END, *SIGNS, *PHRASES, *words, *names)))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Whole phrases and names ("cabinet 12") as tokens. Decoding joins them with single spaces, as commands are written."""
    phrases = "|".join(re.escape(phrase) for phrase in sorted(PHRASES, key=len, reverse=True))
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary())}, unk_token=UNK))
    # What the expression matches is kept, what lies between is dropped: spaces. Without a decoder tokens are joined with a space.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"(?:{phrases})(?!\w)|[a-z]+ \d+|\w+|[^\w\s]|\n"), "removed", invert=True)
    return pretrained(tokenizer, end=END, positions=MOST_POSITIONS)


class Encoder:
    """Text to tokens, remembered: houses repeat themselves."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Encode with this tokenizer."""
        self._tokenizer = tokenizer
        self.end: int = tokenizer.convert_tokens_to_ids(END)
        self.observation = lru_cache(maxsize=1 << 17)(self._observation)
        self.action = lru_cache(maxsize=1 << 15)(self._action)

    def _observation(self, text: str) -> list[int]:
        return list(self._tokenizer(text + CUE, add_special_tokens=False)["input_ids"])

    def _action(self, command: str) -> list[int]:
        return [*self._tokenizer(command, add_special_tokens=False)["input_ids"], self.end]

    def text(self, ids: Sequence[int]) -> str:
        """The command of sampled tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """What the expert saw and did, as one sequence of tokens."""

    ids: list[int]
    is_action: list[bool]  # per token: of a command to be imitated, its line's end included
    is_told: list[bool]  # per token: of an observation; tokens of slips are neither


def slip(command: str, house: House, rng: random.Random) -> str:
    """A mistake in place of the command: something else that is possible, or the same with a wrong name, which mostly does nothing."""
    names = re.findall(r"[a-z]+ \d+", command)
    if not names or rng.random() < 0.5:
        return rng.choice(house.admissible())
    return command.replace(rng.choice(names), rng.choice(tuple(house.game.kinds)))


def demonstrate(game: Game, encoder: Encoder, rng: random.Random) -> Demonstration | None:
    """The expert's game with some slips; None when it does not reach the goal in time."""
    house = House(game)
    expert = Expert(house)
    ids: list[int] = []
    is_action: list[bool] = []
    is_told: list[bool] = []
    observation = game.intro
    for _ in range(MOST_STEPS):
        told = encoder.observation(observation)
        command = expert.act()
        is_slip = rng.random() < SLIPS
        if is_slip:
            command = slip(command, house, rng)
        action = encoder.action(command)
        ids += [*told, *action]
        is_told += [True] * len(told) + [False] * len(action)
        is_action += [False] * len(told) + [not is_slip] * len(action)
        observation = house.step(command)
        if house.is_won:
            return Demonstration(ids=ids, is_action=is_action, is_told=is_told)
    return None


def batches(encoder: Encoder, seed: int) -> Iterator[list[Demonstration]]:
    """Batches of demonstrations of about the same length, each demonstration once, without an end."""
    rng = random.Random(seed)
    game_seed = seed << 32
    while True:
        drawn: list[Demonstration] = []
        while len(drawn) < DRAWN_AT_ONCE:
            demonstration = demonstrate(seeded_game(game_seed), encoder, rng)
            game_seed += 1
            if demonstration is not None:
                drawn.append(demonstration)
        drawn.sort(key=lambda demonstration: len(demonstration.ids))
        cut = [drawn[start : start + BATCH_SIZE] for start in range(0, DRAWN_AT_ONCE, BATCH_SIZE)]
        rng.shuffle(cut)
        yield from cut


def imitation_loss(model: Qwen2ForCausalLM, batch: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Mean loss on tokens of actions, and on tokens of observations."""
    length = max(len(demonstration.ids) for demonstration in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    is_action = torch.zeros(len(batch), length, dtype=torch.bool)
    is_told = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, demonstration in enumerate(batch):
        end = len(demonstration.ids)
        ids[row, :end] = torch.tensor(demonstration.ids)
        is_action[row, :end] = torch.tensor(demonstration.is_action)
        is_told[row, :end] = torch.tensor(demonstration.is_told)
    # Padding is on the right, where no token that counts attends to it: no attention mask.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T-1, D]
    on_actions, on_told = (
        nn.functional.cross_entropy(model.lm_head(hidden[chosen[:, 1:]]), ids[:, 1:][chosen[:, 1:]]) for chosen in (is_action, is_told)
    )
    return on_actions, on_told


def train(model: Qwen2ForCausalLM, encoder: Encoder, seed: int, steps: int) -> None:
    """Imitate with AdamW: a short warm-up, a constant learning rate, and a linear decay at the end."""
    optimizer = build_optimizer(model, LEARNING_RATE)
    model.train()
    started = time.monotonic()
    seen = tokens = 0
    losses = torch.zeros(2)
    for step, batch in zip(range(1, steps + 1), batches(encoder, seed), strict=False):
        left = (steps - step + 1) / (SHARE_OF_DECAY * steps)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP_STEPS, left)
        on_actions, on_told = imitation_loss(model, batch)
        (on_actions + OBSERVATION_WEIGHT * on_told).backward()
        optimizer_step(model, optimizer)
        losses += torch.stack((on_actions, on_told)).detach()
        seen += len(batch)
        tokens += sum(len(demonstration.ids) for demonstration in batch)
        if step % LOG_EVERY == 0:
            loss, told = (losses / LOG_EVERY).tolist()
            losses.zero_()
            spent = time.monotonic() - started
            log.info(
                "step %d, %.0f s, %d demonstrations, %.2fM tokens (%.0f/s): loss on actions %.3f, on observations %.3f",
                step, spent, seen, tokens / 1e6, tokens / spent, loss, told,
            )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Episode:
    """A game that the policy plays."""

    house: House
    ids: list[int]  # every token so far
    pending: list[int]  # the last of them, which the model has not read yet
    actions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    sampled: int = 0  # tokens

    @property
    def is_over(self) -> bool:
        """Won, or out of steps."""
        return self.house.is_won or len(self.actions) >= MOST_STEPS


@torch.no_grad()
def play(model: Qwen2ForCausalLM, encoder: Encoder, games: Sequence[Game], temperature: float = TEMPERATURE) -> list[Episode]:
    """Play games side by side. What was read stays in the cache over turns; unequal texts are padded on the right and masked."""
    episodes = []
    for game in games:
        ids = encoder.observation(game.intro)
        episodes.append(Episode(house=House(game), ids=list(ids), pending=list(ids), observations=[game.intro]))
    live = [episode for episode in episodes if not episode.is_over]
    cache = DynamicCache(config=model.config)
    mask = torch.zeros(len(live), 0, dtype=torch.long)  # [B, S]: which entries of the cache count
    model.eval()
    while live:
        width = max(len(episode.pending) for episode in live)
        chunk = torch.tensor([episode.pending + [0] * (width - len(episode.pending)) for episode in live])
        lengths = torch.tensor([len(episode.pending) for episode in live])
        inside = (torch.arange(width) < lengths[:, None]).long()
        positions = (mask.sum(1, keepdim=True) + inside.cumsum(1) - 1).clamp(min=0)
        mask = torch.cat((mask, inside), 1)
        hidden = model.model(input_ids=chunk, attention_mask=mask, position_ids=positions, cache=cache).last_hidden_state
        last = hidden[torch.arange(len(live)), lengths - 1]  # [B, D]
        actions: list[list[int]] = [[] for _ in live]
        is_open = torch.ones(len(live), dtype=torch.bool)
        for _ in range(LONGEST_ACTION):
            tokens = torch.multinomial(torch.softmax(model.lm_head(last).float() / temperature, -1), 1)  # [B, 1]
            for row in is_open.nonzero()[:, 0].tolist():
                actions[row].append(int(tokens[row, 0]))
            is_open &= tokens[:, 0] != encoder.end
            if not is_open.any():
                break
            positions = mask.sum(1, keepdim=True)
            mask = torch.cat((mask, is_open.long()[:, None]), 1)
            output = model.model(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache)
            last = output.last_hidden_state[:, 0]
        else:
            mask[is_open, -1] = 0  # an action that never ended: its last token is read with the next text, as the others' are
        for episode, action in zip(live, actions, strict=True):
            _act(episode, action, encoder)
        kept = [row for row, episode in enumerate(live) if not episode.is_over]
        if len(kept) < len(live):
            live = [live[row] for row in kept]
            mask = mask[kept]
            cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))
        mask = _close_gaps(cache, mask)
    return episodes


def _close_gaps(cache: DynamicCache, mask: Tensor) -> Tensor:
    """Move the entries of the cache that count to the left, in their order, and cut off what no row needs: [B, S] -> [B, longest row]."""
    order = mask.argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max()) if len(mask) else 0]
    for layer in cache.layers:
        index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])  # [B, H, S, D]
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    return mask.gather(1, order)


def _act(episode: Episode, action: list[int], encoder: Encoder) -> None:
    """Carry out what was sampled."""
    command = encoder.text(action)
    observation = episode.house.step(command)
    episode.actions.append(command)
    episode.observations.append(observation)
    episode.sampled += len(action)
    told = [] if episode.is_over else encoder.observation(observation)
    episode.ids += [*action, *told]
    episode.pending = [action[-1], *told]


def probe_games(split: Split, count: int) -> list[Game]:
    """Games that no demonstration shows."""
    return [seeded_game(PROBE_SEED + index, split) for index in range(count)]


def probe(model: Qwen2ForCausalLM, encoder: Encoder, split: Split, count: int) -> list[list[Episode]]:
    """Groups of episodes, one for each game."""
    games = [game for game in probe_games(split, count) for _ in range(GROUP)]
    episodes = [
        episode for start in range(0, len(games), PLAYED_AT_ONCE) for episode in play(model, encoder, games[start : start + PLAYED_AT_ONCE])
    ]
    return [episodes[start : start + GROUP] for start in range(0, len(episodes), GROUP)]


def describe(split: Split, groups: Sequence[Sequence[Episode]]) -> str:
    """The measured result, for a person."""
    episodes = [episode for group in groups for episode in group]
    by_type: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        by_type[episode.house.game.goal.task_type].append(episode.house.is_won)
    wins = [sum(episode.house.is_won for episode in group) for group in groups]
    mixed = sum(0 < count < GROUP for count in wins)
    actions = sum(len(episode.actions) for episode in episodes)
    idle = sum(observation == NOTHING for episode in episodes for observation in episode.observations)
    lines = [
        f"{split}: {len(episodes)} episodes of {len(groups)} games at temperature {TEMPERATURE}",
        f"  success {sum(wins) / len(episodes):.1%}",
        *(f"    {task_type} {sum(by_type[task_type]) / max(1, len(by_type[task_type])):.1%}" for task_type in TASK_TYPES),
        f"  groups of {GROUP}: all fail {wins.count(0) / len(groups):.1%}, mixed {mixed / len(groups):.1%}, "
        f"all succeed {wins.count(GROUP) / len(groups):.1%}",
        f"  sampled tokens per action {sum(episode.sampled for episode in episodes) / actions:.2f}, tokens per episode "
        f"{sum(len(episode.ids) for episode in episodes) / len(episodes):.0f} (most {max(len(episode.ids) for episode in episodes)}), "
        f"steps per episode {actions / len(episodes):.1f}, actions that do nothing {idle / actions:.1%}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1, help="another number gives other sums and so another policy")
    parser.add_argument("--probe-games", type=int, default=60, help=f"per split, each played {GROUP} times")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    encoder = Encoder(tokenizer)
    model = build_model(tokenizer)
    log.info("%d tokens in the vocabulary, %.2fM parameters", len(tokenizer), sum(p.numel() for p in model.parameters()) / 1e6)
    train(model, encoder, arguments.seed, arguments.steps)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    torch.manual_seed(arguments.seed)
    for split in PROBES:
        log.info("%s", describe(split, probe(model, encoder, split, arguments.probe_games)))


if __name__ == "__main__":
    main()
