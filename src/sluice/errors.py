"""One typed error per boundary, so that a caller can tell a bad setting from a broken verifier.

Each message tells four things: what was expected, what came, where, what to do. Faults of single items are never raised as these:
they become counted data (`sluice.types.Failure`), and `describe` makes the text that is kept of one.
"""

from __future__ import annotations

from typing import Final

DETAIL_CHARS: Final = 600  # longest text kept of one failure: enough for a person, bounded for a run that fails a million times


class SluiceError(Exception):
    """Base of every error that Sluice raises on purpose."""


class ConfigError(SluiceError, ValueError):
    """A setting is wrong: unknown key, impossible combination, wrong type. Raised while loading."""


class TaskError(SluiceError, ValueError):
    """The data are wrong: a data set is missing, unreadable or empty, or a row lacks a field."""


class GenerationError(SluiceError, RuntimeError):
    """The engine is wrong: it is closed or broken, weights do not fit. A folder without a usable model is a `ConfigError`."""


class RequestRefused(GenerationError):
    """One request can never be served: too long, or of tokens that the model does not have. Others can: the engine is well."""


class RewardError(SluiceError, RuntimeError):
    """A verifier or its worker pool is wrong as a whole (single failures are data)."""


class EnvError(SluiceError, RuntimeError):
    """An environment breaks its contract, or cannot be built or run at all. Names the environment and the call; single faults are data."""


class FilterError(SluiceError, ValueError):
    """A filter was given something it cannot judge, or a custom filter answered something that is no answer."""


class GateError(SluiceError, ValueError):
    """The gate was given something that it cannot compare or judge, or was told what cannot have happened."""


class AnalysisError(SluiceError, ValueError):
    """Recorded data cannot be read or analysed: a file, a column or a cell is not what the offline tools need."""


class CorrectionError(SluiceError, ValueError):
    """Log-probs and masks that cannot be corrected: one is missing, or they do not fit each other. Names the argument."""


class TrainerError(SluiceError, RuntimeError):
    """The trainer is wrong: log-probs that do not match, shapes that do not fit."""


class LoopError(SluiceError, ValueError):
    """A user-defined rollout loop breaks its contract, or cannot be loaded."""


class DataError(SluiceError, ValueError):
    """A DataProto was asked for what it cannot give: columns that do not fit together, rows that were freed."""


class QueueError(SluiceError, ValueError):
    """A group queue was told or asked what cannot be: an episode that was never opened, a step back, a member that it cannot read."""


class ResampleError(SluiceError, RuntimeError):
    """A batch could not be filled within its bounds. The message names kept and needed, the acceptance rate and the top reasons."""


class RecordError(SluiceError, RuntimeError):
    """A run folder is missing, in use, or not one of ours."""


class SchedulerBug(SluiceError, AssertionError):
    """The machine was told something impossible. The message holds the whole story of the group: please report it."""


def describe(err: BaseException) -> str:
    """Type, message and place of an exception: `ValueError: no door (maze.py:12 in step)`."""
    try:
        message = str(err)
    except Exception:  # noqa: BLE001 - an exception class of foreign code
        message = "(its message cannot be read)"
    trace = err.__traceback__
    if trace is None:
        return cut(f"{type(err).__name__}: {message}")
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    place = f"({code.co_filename}:{trace.tb_lineno} in {code.co_name})"
    return f"{cut(f'{type(err).__name__}: {message}', DETAIL_CHARS - len(place) - 100)} {place}"


def cut(text: str, limit: int = DETAIL_CHARS) -> str:
    """The text, or its beginning; what cannot be written as UTF-8 is written as its code."""
    if not text.isascii():
        text = text[: limit + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."
