"""Groups of verl's rows are filtered, and a batch is filled over several generations. Run it: python examples/verl_groups.py

With verl installed the rows are its DataProto, else a stand-in with the same columns.
"""

import numpy as np

from sluice.integrations.verl import BatchFiller, GroupFilter

try:
    import torch
    from verl import DataProto
except ImportError:
    DataProto = None


class Rows:
    """Columns, as verl's DataProto holds them."""

    def __init__(self, batch, non_tensor_batch):
        self.batch, self.non_tensor_batch = batch, non_tensor_batch

    def select_idxs(self, rows):
        return Rows(*({name: values[rows] for name, values in columns.items()} for columns in (self.batch, self.non_tensor_batch)))

    @staticmethod
    def concat(parts):
        first = parts[0]
        return Rows(
            {name: np.concatenate([part.batch[name] for part in parts]) for name in first.batch},
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
        )


def generate_and_score(prompts, random):
    """Four rollouts a prompt: what a rollout worker and a reward manager of verl leave in a batch."""
    uids = np.repeat(np.array([f"prompt {prompt}" for prompt in prompts], dtype=object), 4)
    acc = (random.random(len(uids)) < random.choice([0.0, 0.5, 1.0], len(prompts)).repeat(4)).astype(np.float32)
    scores = np.zeros((len(uids), 5), dtype=np.float32)
    scores[:, -1] = acc - 0.1 * random.random(len(uids))  # a length penalty is in the score, and must not decide
    if DataProto is None:
        return Rows({"rm_scores": scores}, {"uid": uids, "acc": acc})
    return DataProto.from_dict(tensors={"rm_scores": torch.from_numpy(scores)}, non_tensors={"uid": uids, "acc": acc})


random = np.random.default_rng(0)
filler = BatchFiller(groups=4, group_filter=GroupFilter(query_filter={"type": "std_filter", "metric": "acc"}), max_gen_batches=10)
drawn = 0
while missing := filler.missing:
    judged = filler.add(generate_and_score(range(drawn, drawn + missing), random))
    drawn += missing
    print({uid: verdict.reason for uid, verdict in judged.verdicts.items()})
batch, metrics = filler.take()
print(f"{type(batch).__name__} of {len(batch.non_tensor_batch['uid'])} rows", metrics)
