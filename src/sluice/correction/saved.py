"""Batches of log-probs in files: what `train_infer_correction.save_every_steps` writes, and what anybody else can.

A file holds three arrays [B, T] (a mask may have one column more): the trainer's log-probs at the start of the step, the sampler's, and
the mask of the sampled tokens. Each goes by any of the names that the libraries of this field have for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sluice.correction.tensors import check_tensors
from sluice.errors import CorrectionError

FOLDER: Final = "correction"
"""Where a run keeps them, in its folder."""

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "old_logprobs": ("old_log_probs", "old_logprobs", "old_per_token_logps", "train_log_probs"),
    "inference_logprobs": (
        "infer_logprobs", "inference_logprobs", "rollout_log_probs", "sampling_per_token_logps", "rollout_logprobs",
    ),
    "response_mask": ("response_mask", "tool_mask", "loss_mask", "loss_masks", "completion_mask", "action_mask"),
}  # fmt: skip
"""What an array is -> its names in a file, the first one found being taken; we write the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """Log-probs of one or more batches."""

    mask: Tensor  # [B, T] bool
    old: Tensor  # [B, T] floating
    inference: Tensor  # [B, T] of the same type
    files: tuple[Path, ...]


def step_file(folder: Path, step: int) -> Path:
    """The file of a step in the folder of a run."""
    return folder / f"step-{step:06d}.npz"


def save_batch(path: Path, mask: Any, old_logprobs: Any, inference_logprobs: Any) -> None:
    """Write one batch, [B, T] each, as a compressed NumPy archive.

    Raises:
        CorrectionError: the disk refuses.
    """
    values = zip(NAMES.values(), (old_logprobs, inference_logprobs, mask), strict=True)
    arrays: dict[str, Any] = {names[0]: np.asarray(value) for names, value in values}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)
    except OSError as error:
        raise CorrectionError(
            f"{path}: expected a file that can be written, got: {error.strerror or error} - free space, or leave "
            "train_infer_correction.save_every_steps away"
        ) from error


def load_batches(path: Path | str) -> SavedBatch:
    """Read a file (.npz or .safetensors), all files of a folder, or those that a run has saved.

    Raises:
        CorrectionError: there is nothing to read, or something does not fit together.
    """
    path = Path(path)
    parts = [_read(file) for file in _files(path)]
    dtype, width = max((part.old.dtype for part in parts), key=lambda one: torch.finfo(one).bits), max(part.old.shape[1] for part in parts)

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return torch.cat([pad(tensor, (0, width - tensor.shape[1])).to(dtype) for tensor in (getattr(part, name) for part in parts)])

    return SavedBatch(
        mask=joined("mask", torch.bool),
        old=joined("old", dtype),
        inference=joined("inference", dtype),
        files=tuple(file for part in parts for file in part.files),
    )


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise CorrectionError(f"{path}: expected a file of log-probs, or the folder of a run, got nothing - correct the path")
    for folder in (path / FOLDER, path):
        found = sorted([*folder.glob("*.npz"), *folder.glob("*.safetensors")])
        if found and (folder != path or not (path / "config.yaml").is_file()):
            return found
    has_rollouts = any(path.glob("rollouts/*.parquet")) or any(path.glob("*.parquet"))
    hint = "its recorded rollouts hold the sampler's log-probs only; " if has_rollouts else ""
    raise CorrectionError(
        f"{path}: expected files of log-probs (.npz, .safetensors), got none - {hint}let a run save both with "
        "train_infer_correction.save_every_steps, or save a batch of your own"
    )


def _read(path: Path) -> SavedBatch:
    arrays = _arrays(path)
    tensors = {}
    for what, names in NAMES.items():
        name = next((name for name in names if name in arrays), None)
        if name is None:
            raise CorrectionError(
                f"{path}: expected {what}, under one of the names {', '.join(names)}, got {', '.join(sorted(arrays)) or 'no array'} - save "
                "both log-probs and the mask"
            )
        tensors[what] = arrays[name]
    try:
        mask = check_tensors(tensors["response_mask"], tensors["old_logprobs"], tensors["inference_logprobs"])
    except CorrectionError as error:
        raise CorrectionError(f"{path}: {error}") from error
    return SavedBatch(mask=mask.bool(), old=tensors["old_logprobs"], inference=tensors["inference_logprobs"], files=(path,))


def _arrays(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
    except ModuleNotFoundError:
        raise
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise CorrectionError(f"{path}: expected whole arrays of numbers, got {type(error).__name__}: {error} - save it again") from error
    except Exception as error:
        if "safetensor" not in type(error).__name__.lower():
            raise
        raise CorrectionError(f"{path}: expected a whole safetensors file, got: {error} - save it again") from error
    raise CorrectionError(
        f"{path}: expected a .npz or .safetensors file, got {path.suffix or 'no suffix'} - convert it: arrays only, no pickles"
    )
