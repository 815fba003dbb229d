"""Dynamic sampling without another trainer class: a rollout function for GRPOTrainer. Run it: python examples/trl_rollout_func.py"""

from datasets import Dataset
from tiny_model import tiny_model
from trl import GRPOConfig, GRPOTrainer

from sluice.integrations.trl import DynamicRollout, DynamicSampling


def correct(completions, answer, **kwargs):
    return [float(completion.startswith(digit)) for completion, digit in zip(completions, answer, strict=True)]


digits = [{"prompt": f"{digit}>", "answer": str((digit + 1) % 10)} for digit in range(10)]
dynamic = DynamicRollout(correct, dynamic_sampling=DynamicSampling(max_resample_rounds=20))
trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=dynamic.reward_funcs,
    rollout_func=dynamic,
    train_dataset=Dataset.from_list(digits * 20),
    args=GRPOConfig(
        output_dir="trl-example",
        use_cpu=True,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=1,
        max_steps=30,
        learning_rate=3e-3,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        seed=1,
    ),
)
trainer.train()
