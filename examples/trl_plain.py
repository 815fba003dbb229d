"""A plain TRL script: a model learns which digit comes next. Run it: python examples/trl_plain.py"""

from datasets import Dataset
from tiny_model import tiny_model
from trl import GRPOConfig, GRPOTrainer


def correct(completions, answer, **kwargs):
    return [float(completion.startswith(digit)) for completion, digit in zip(completions, answer, strict=True)]


digits = [{"prompt": f"{digit}>", "answer": str((digit + 1) % 10)} for digit in range(10)]
trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=correct,
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
