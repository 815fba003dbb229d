"""What the notes of several rows say of one of them. Without torch, for data of any library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def metrics_of_row(metrics: Mapping[Any, Any] | None, index: int, rows: int) -> dict[str, Any]:
    """The named scores of one row out of several: of an entry with one value per row (a list, an array, a tensor) its own; the others are
    about all of them.
    """
    return {str(name): value[index] if _has_one_per_row(value, rows) else value for name, value in (metrics or {}).items()}


def _has_one_per_row(value: Any, rows: int) -> bool:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) == 1 and shape[0] == rows
    return isinstance(value, list | tuple) and len(value) == rows
