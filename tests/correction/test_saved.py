from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sluice.correction import load_batches, save_batch
from sluice.errors import CorrectionError


def arrays(rows: int = 2, width: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.random((rows, width)) < 0.7, -random.exponential(size=(rows, width)), -random.exponential(size=(rows, width))


def test_what_is_saved_is_loaded_and_batches_of_a_folder_stand_one_below_the_other(tmp_path: Path) -> None:
    first, second = arrays(2, 3), arrays(4, 5, seed=1)
    save_batch(tmp_path / "correction" / "step-000001.npz", *first)
    save_batch(tmp_path / "correction" / "step-000002.npz", *second)
    one = load_batches(tmp_path / "correction" / "step-000001.npz")
    for found, expected in zip((one.mask, one.old, one.inference), first, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)
    for path in (tmp_path, tmp_path / "correction"):
        both = load_batches(path)
        assert len(both.files) == 2
        assert both.old.shape == (6, 5)
        assert not both.mask[:2, 3:].any()
        np.testing.assert_array_equal(both.inference[2:].numpy(), second[2])


@pytest.mark.parametrize(
    "names",
    [
        ("response_mask", "old_log_probs", "infer_logprobs"),
        ("tool_mask", "old_per_token_logps", "sampling_per_token_logps"),
        ("response_mask", "old_log_probs", "rollout_log_probs"),
        ("loss_masks", "train_log_probs", "rollout_log_probs"),
    ],
)
def test_arrays_go_by_the_names_of_other_libraries_in_either_kind_of_file(tmp_path: Path, names: tuple[str, ...]) -> None:
    mask, old, inference = arrays()
    wide = np.concatenate([np.ones((2, 1), dtype=bool), mask], axis=1)  # of the tokens, one more than log-probs
    named: dict[str, Any] = dict(zip(names, (wide, old, inference), strict=True))
    np.savez(tmp_path / "batch.npz", **named)
    save_file({name: torch.from_numpy(array) for name, array in named.items()}, tmp_path / "batch.safetensors")
    for file in ("batch.npz", "batch.safetensors"):
        found = load_batches(tmp_path / file)
        np.testing.assert_array_equal(found.mask.numpy(), mask)
        np.testing.assert_array_equal(found.old.numpy(), old)


def test_files_that_hold_something_else_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    mask, old, inference = arrays()
    with pytest.raises(CorrectionError, match="expected a file of log-probs, or the folder of a run, got nothing"):
        load_batches(tmp_path / "nothing.npz")
    with pytest.raises(CorrectionError, match="got none - let a run save both with train_infer_correction.save_every_steps"):
        load_batches(tmp_path)
    np.savez(tmp_path / "half.npz", response_mask=mask, old_log_probs=old)
    with pytest.raises(
        CorrectionError, match="half.npz: expected inference_logprobs, under one of the names infer_logprobs, .*got old_log"
    ):
        load_batches(tmp_path / "half.npz")
    np.savez(tmp_path / "uneven.npz", response_mask=mask, old_log_probs=old, infer_logprobs=inference[:, :2])
    with pytest.raises(CorrectionError, match=r"uneven.npz: inference_logprobs: expected the shape of old_logprobs, \(2, 3\)"):
        load_batches(tmp_path / "uneven.npz")
    for name in ("broken.npz", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing")
        with pytest.raises(CorrectionError, match=f"{name}: expected .* - save it again"):
            load_batches(tmp_path / name)
    np.savez(tmp_path / "pickled.npz", response_mask=np.array([{}], dtype=object))
    with pytest.raises(CorrectionError, match="pickled.npz: expected whole arrays of numbers"):
        load_batches(tmp_path / "pickled.npz")
    (tmp_path / "batch.pt").write_bytes(b"x")
    with pytest.raises(CorrectionError, match=r"expected a \.npz or \.safetensors file, got \.pt"):
        load_batches(tmp_path / "batch.pt")


def test_recorded_rollouts_without_the_trainers_log_probs_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "part-000000.parquet").touch()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CorrectionError, match="its recorded rollouts hold the sampler's log-probs only; let a run save both"):
        load_batches(tmp_path)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CorrectionError, match="expected a file that can be written"):
        save_batch(tmp_path / "file" / "step-000001.npz", *arrays())
