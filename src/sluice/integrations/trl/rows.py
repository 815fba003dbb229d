"""Completions as TRL makes and reads them, one record each, so that they can be chosen from, moved between processes and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sluice.errors import TrainerError


class Generated(NamedTuple):
    """What `GRPOTrainer._generate` answers, for the rows of one process, in its order."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None  # 1 on tokens that the policy sampled; None: all are
    completions: list[Any]  # text, or a list of chat messages
    logprobs: list[list[float | None]] | None  # of the sampler; None: it reports none
    extra_fields: Mapping[str, Any]  # of a rollout function, for the reward functions
    images: list[Any] | None
    tool_images: list[Any]  # per row, or [] where there are no tools


@dataclass(slots=True, kw_only=True)
class Row:
    """One completion with everything that TRL makes of it. Picklable where the data set's rows are."""

    entry: dict[str, Any]  # the row of the data set, with the extra fields of a rollout function
    prompt: Any  # text or chat messages, as it was generated from
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any
    tool_mask: list[int] | None = None
    logprobs: list[float | None] | None = None
    images: Any = None
    tool_images: Any = None
    rewards: tuple[float, ...] = ()  # by reward function; NaN where it gave none
    logs: dict[str, Any] = field(default_factory=dict)  # what reward functions said about it for the table of completions
    is_neutral: bool = False  # it only fills a place: no advantage, no loss, no part in any statistic

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return len(self.completion_ids) if self.tool_mask is None else sum(self.tool_mask)

    def as_neutral(self) -> Row:
        """The same row as a filler: whatever it earned is gone."""
        return replace(self, rewards=(float("nan"),) * len(self.rewards), logs={}, is_neutral=True)


def split_rows(inputs: Sequence[dict[str, Any]], prompts: Sequence[Any], made: Generated) -> list[Row]:
    """One record per row of a generation. The extra fields are merged into the rows of the data, as TRL does for its reward functions.

    Raises `TrainerError` when the generation has another number of rows than was asked for, or a row columns of different lengths: TRL
    would fill the shorter ones up, log-probs with 0 and masks with 1.
    """
    for name in ("prompt_ids", "completion_ids", "completions"):
        _require_rows(name, getattr(made, name), len(inputs))
    for name, columns in (("one log-prob", made.logprobs), ("one entry of env_mask", made.tool_mask)):
        if columns is not None:
            _require_rows("logprobs" if columns is made.logprobs else "env_mask", columns, len(inputs))
            _require_lengths(name, columns, made.completion_ids)
    rows = []
    for index, (entry, prompt) in enumerate(zip(inputs, prompts, strict=True)):
        for key, values in made.extra_fields.items():
            if not isinstance(values, list):
                entry[key] = values
            elif index < len(values):
                entry[key] = values[index]
        rows.append(
            Row(
                entry=entry,
                prompt=prompt,
                prompt_ids=list(made.prompt_ids[index]),
                completion_ids=list(made.completion_ids[index]),
                completion=made.completions[index],
                tool_mask=None if made.tool_mask is None else list(made.tool_mask[index]),
                logprobs=None if made.logprobs is None else list(made.logprobs[index]),
                images=None if made.images is None else made.images[index],
                tool_images=made.tool_images[index] if made.tool_images else None,
            )
        )
    return rows


def require_answer(prompts: Sequence[Any], answer: Any) -> None:
    """Raise `TrainerError` for an answer of a rollout function that TRL would stumble over without saying so."""
    if not isinstance(answer, Mapping):
        raise TrainerError(
            f"expected a mapping with prompt_ids, completion_ids and logprobs from the rollout function, got {type(answer).__name__} - "
            "return one row of each for every prompt"
        )
    for name in ("prompt_ids", "completion_ids", "env_mask"):
        if answer.get(name) is not None:
            _require_rows(name, answer[name], len(prompts))
    for row, ids in enumerate(answer.get("completion_ids") or ()):
        if not len(ids):
            raise TrainerError(
                f"row {row}: expected at least one token, got none - a completion that ended at once holds its end token, with its log-prob"
            )


def _require_rows(name: str, values: Sequence[Any], rows: int) -> None:
    if len(values) != rows:
        raise TrainerError(
            f"expected {rows} rows of {name} from the generation, one for each prompt it was given, got {len(values)} - a rollout function "
            "answers for exactly its prompts, in their order"
        )


def _require_lengths(what: str, columns: Sequence[Any], completion_ids: Sequence[Sequence[int]]) -> None:
    for row, (values, ids) in enumerate(zip(columns, completion_ids, strict=True)):
        got = None if values is None else len(values)
        if got != len(ids):
            raise TrainerError(
                f"row {row}: expected {what} for each of its {len(ids)} tokens, got {got} - append and trim in every column alike: "
                "a token that was not sampled has a log-prob of 0 and is left out by env_mask"
            )


def join_rows(rows: Sequence[Row]) -> Generated:
    """The opposite of `split_rows`, for the rows that were chosen. The extra fields are in the rows of the data already."""
    with_logprobs = all(row.logprobs is not None for row in rows)
    with_masks = any(row.tool_mask is not None for row in rows)
    with_tools = any(row.tool_images is not None for row in rows)
    return Generated(
        prompt_ids=[row.prompt_ids for row in rows],
        completion_ids=[row.completion_ids for row in rows],
        tool_mask=[[1] * len(row.completion_ids) if row.tool_mask is None else row.tool_mask for row in rows] if with_masks else None,
        completions=[row.completion for row in rows],
        logprobs=[row.logprobs or [] for row in rows] if with_logprobs else None,
        extra_fields={},
        images=[row.images for row in rows] if any(row.images is not None for row in rows) else None,
        tool_images=[row.tool_images or [] for row in rows] if with_tools else [],
    )
