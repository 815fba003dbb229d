"""Requests and responses as DataProto: what a loop asks with, what the engine reports, and the rows made of both.

A request has one row: the prompt, padded on the left to `prompt_length`. A report has one row per response and no tensors: token ids,
log-probs and finish reasons stand in its meta_info, as ROLL's engines report them. `postprocess_output_data` makes the rows that
everything after it works with, `sequence_length` wide: prompt on the left, response behind it, padding on the right.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from sluice.errors import LoopError
from sluice.roll.data import METRICS, DataProto, column
from sluice.roll.notes import metrics_of_row
from sluice.types import Task, TokenIds

ABORTED: Final = "abort"
"""Finish reason of a response that `abort_running_requests` stopped."""

ROLLOUT_ID: Final = "rollout_id"
"""Column that says which attempt a row is. Whatever a loop does to its rows, this one stays."""


def expand_requests(data: DataProto, num_return_sequences: int, is_num_return_sequences_expand: bool) -> list[DataProto]:
    """One request for all responses, or, expanded, one for each. Each is a deep copy; `num_return_sequences` in the generation_config of
    `data` and of the copies is what a single request asks for."""
    if "generation_config" not in data.meta_info:
        raise LoopError(
            f"expected meta_info['generation_config'] in a request, got {sorted(data.meta_info)} - use context.get_request_data"
        )
    count = num_return_sequences if is_num_return_sequences_expand else 1
    data.meta_info["generation_config"]["num_return_sequences"] = 1 if is_num_return_sequences_expand else num_return_sequences
    return [copy.deepcopy(data) for _ in range(count)]


def expand_responses(response: DataProto | Sequence[Any] | None) -> list[DataProto]:
    """The rows of a DataProto, or of any nesting of lists of them, one DataProto each, in order. None: no rows.

    Of `meta_info["metrics"]` with one value per row each row gets its own.
    """
    rows: list[DataProto] = []
    todo: deque[Any] = deque([response])
    while todo:
        current = todo.popleft()
        if isinstance(current, DataProto):
            rows += [current] if len(current) == 1 else _rows_of(current)
        elif isinstance(current, list | tuple):
            todo.extendleft(reversed(current))
        elif response is not None:
            raise LoopError(
                f"expected responses as DataProto or lists of them, got {type(current).__name__} - return what the context gave"
            )
    return rows


def _rows_of(data: DataProto) -> list[DataProto]:
    rows = [data[index] for index in range(len(data))]
    if METRICS in data.meta_info:
        for index, row in enumerate(rows):
            row.meta_info[METRICS] = metrics_of_row(data.meta_info[METRICS], index, len(rows))
    return rows


def is_report_data_finished(data: DataProto) -> bool:
    """Whether no response of a report was stopped by `abort_running_requests`."""
    return ABORTED not in data.meta_info.get("finish_reasons", ())


def request_of(task: Task, *, prompt_length: int, pad_token_id: int, meta_info: dict[str, Any]) -> DataProto:
    """The prompt of a task as one row, with the columns of its data row. Tensors are [1, prompt_length] int64."""
    width = max(prompt_length, len(task.prompt_ids))
    ids, mask = _padded([task.prompt_ids], width, pad_token_id, on_the_left=True)
    columns: dict[str, Any] = {str(name): value for name, value in task.entry.items()}
    columns |= {
        "id": task.task_id,
        "domain": task.domain,
        "tag": task.tag or task.domain,
        "prompt": task.prompt,
        "ground_truth": task.answer,
    }
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask)}
    return DataProto.from_dict(tensors, {name: [value] for name, value in columns.items() if name not in tensors}, meta_info=meta_info)


def prompt_of(request: DataProto) -> TokenIds:
    """The tokens of a request without their padding. [P]"""
    if len(request) != 1:
        raise LoopError(f"expected a request of one row, got {len(request)} - ask for several responses by num_return_sequences")
    ids, mask = request["input_ids"][0], request["attention_mask"][0]
    prompt: TokenIds = ids[mask.bool()].cpu().numpy().astype(np.int64)
    if not len(prompt):
        raise LoopError("expected a prompt of at least one token in a request, got none - see its attention_mask")
    return prompt


def report_of(
    *,
    rollout_ids: Sequence[str],
    texts: Sequence[str],
    token_ids: Sequence[TokenIds],
    logprobs: Sequence[Any],
    finish_reasons: Sequence[str],
    eos_token_id: int | None,
    pad_token_id: int,
) -> DataProto:
    """What the engine says to a request: one row per response, the sampled tokens in meta_info."""
    return DataProto(
        non_tensor_batch={ROLLOUT_ID: column(rollout_ids), "response_text": column(texts)},
        meta_info={
            "output_token_ids": [ids.tolist() for ids in token_ids],
            "output_logprobs": [values.tolist() for values in logprobs],
            "finish_reasons": list(finish_reasons),
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        },
    )


def postprocess_output_data(request: DataProto, data: DataProto, sequence_length: int) -> DataProto:
    """The rows of a request's responses: prompt and response in one sequence, `sequence_length` wide.

    Returns:
        batch: input_ids, attention_mask, position_ids [n, T] int64; prompt_mask, response_mask [n, T] bool; infer_logprobs [n, T-1]
        float32, where [:, t-1] belongs to token t and is 0 where the policy did not sample; prompts [n, P], responses [n, T-P] int64.
        non_tensor_batch: the columns of the request, and `rollout_id` and `response_text` of the report.
        meta_info: that of the request, and finish_reasons, eos_token_id and pad_token_id of the report.

    Raises:
        LoopError: `data` is no report of `context.generate`, or a response does not fit.
    """
    notes = data.meta_info
    if "output_token_ids" not in notes or ROLLOUT_ID not in data.non_tensor_batch:
        raise LoopError(f"expected the report that context.generate answered with, got one with {sorted(notes)} - keep it as it came")
    outputs = [np.asarray(ids, dtype=np.int64) for ids in notes["output_token_ids"]]
    logprobs = [np.asarray(values, dtype=np.float32) for values in notes["output_logprobs"]]
    pad = int(notes["pad_token_id"])
    prompts, prompt_mask = request["input_ids"], request["attention_mask"]
    count, prompt_width = len(outputs), int(prompts.shape[1])
    room = sequence_length - prompt_width
    longest = max(map(len, outputs), default=0)
    if longest > room:
        raise LoopError(
            f"expected responses of at most {room} tokens (sequence_length {sequence_length} less a prompt of {prompt_width} columns), got "
            f"{longest} - give context.sequence_length"
        )
    prompts, prompt_mask = prompts.repeat(count, 1), prompt_mask.repeat(count, 1)
    responses, mask = _padded(outputs, room, pad, on_the_left=False)
    infer = torch.zeros((count, sequence_length), dtype=torch.float32)
    for row, values in enumerate(logprobs):
        infer[row, prompt_width : prompt_width + len(values)] = torch.from_numpy(values)
    attention = torch.cat([prompt_mask, mask], dim=1)
    nothing = torch.zeros_like(prompt_mask)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": _positions(attention),
        "prompt_mask": torch.cat([prompt_mask, torch.zeros_like(mask)], dim=1).bool(),
        "response_mask": torch.cat([nothing, mask], dim=1).bool(),
        "infer_logprobs": infer[:, 1:].clone(),
    }
    columns = {name: [values[0]] * count for name, values in request.non_tensor_batch.items()}
    columns |= {name: list(values) for name, values in data.non_tensor_batch.items()}
    own = {name: notes[name] for name in ("finish_reasons", "eos_token_id", "pad_token_id")}
    return DataProto.from_dict(tensors, columns, meta_info=copy.deepcopy(request.meta_info) | own)


def _padded(rows: Sequence[TokenIds], width: int, pad: int, *, on_the_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, [rows, width] int64 each."""
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if on_the_left else slice(0, len(tokens))
        ids[row, place] = tokens
        mask[row, place] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of every token among those that attention sees; 0 for padding on the left, the last one for padding on the right."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)
