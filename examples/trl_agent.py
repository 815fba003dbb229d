"""A game of several turns with the gate and the correction inside TRL. Run it: python examples/trl_agent.py

A member walks on the digits 0 to 9 from a start to a goal: it writes + or - and reads where it is. Groups whose members have done the same
three steps are on their way to one reward: the gate cuts them there, and other problems take their place.
"""

import torch
from datasets import Dataset
from tiny_model import TOKENS, tiny_model
from trl import GRPOConfig

from sluice.gate import Gate
from sluice.integrations.trl import DynamicSampling, DynamicSamplingGRPOTrainer

HORIZON = 8
NUMBER = {token: index for index, token in enumerate(TOKENS)}


@torch.no_grad()
def walk(prompts, trainer):
    watch = trainer.rollout_watch
    starts = [(int(prompt[0]), int(prompt[2])) for prompt in prompts]
    places, goals = (list(numbers) for numbers in zip(*starts, strict=True))
    ids = [[NUMBER[letter] for letter in prompt] for prompt in prompts]
    completions, logprobs, masks = ([[] for _ in prompts] for _ in range(3))
    running = list(range(len(prompts)))
    for _ in range(HORIZON):
        running = [row for row in running if not watch.is_cut(row)]
        if not running:
            break
        context = torch.tensor([ids[row] + completions[row] for row in running])  # all of one length: they walk in step
        odds = torch.log_softmax(trainer.model(input_ids=context).logits[:, -1].float() / trainer.temperature, dim=-1)
        for row, token, row_odds in zip(running, torch.multinomial(odds.exp(), 1)[:, 0].tolist(), odds, strict=True):
            action = TOKENS[token] if TOKENS[token] in "+-" else "stay"
            watch.step(row, action, str(places[row]))
            places[row] = min(9, max(0, places[row] + (action == "+") - (action == "-")))
            completions[row] += [token, NUMBER[str(places[row])]]
            logprobs[row] += [float(row_odds[token]), 0.0]
            masks[row] += [1, 0]  # what the policy wrote, and what the game answered
            if places[row] == goals[row]:
                watch.ended(row)
        running = [row for row in running if places[row] != goals[row]]
    reached = [place == goal for place, goal in zip(places, goals, strict=True)]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks, "reached": reached}


def goal(reached, **kwargs):
    return [float(there) for there in reached]


problems = [f"{start}>{end}" for start in range(10) for end in range(10) if 0 < abs(start - end) <= 3]
trainer = DynamicSamplingGRPOTrainer(
    model=tiny_model(),
    reward_funcs=goal,
    rollout_func=walk,
    dynamic_sampling=DynamicSampling(gate=Gate(k=3, threshold=0.2, horizon=HORIZON), max_resample_rounds=20),
    train_infer_correction={"presets": ["token_tis"]},
    train_dataset=Dataset.from_dict({"prompt": problems * 10}),
    args=GRPOConfig(
        output_dir="trl-example",
        use_cpu=True,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=2 * HORIZON,
        max_steps=20,
        learning_rate=1e-3,
        logging_steps=5,
        report_to="none",
        save_strategy="no",
        seed=1,
    ),
)
trainer.train()
