"""Builds the tasks of a run: reads every source, filters, labels, writes and tokenises prompts, and accounts for every row.

A row meets these questions in turn, and the first that turns it away is counted (report.REASONS): the dataset filter, its domain (a label
that leads to no domain stops the run), whether that has a share in `domain_interleave_probs`, its prompt (one that is no text stops the
run), its answer, its length, for validation whether it is a training prompt, and at last `num_samples` or `max_items`. Validation data
meet no dataset filter and need no share; a held-out prompt that is empty, too long or without the answer that its verifier needs cannot be
evaluated and is left out with a warning, never silently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from sluice.config.models import RlvrConfig, TaskSourceConfig, VerifierConfig
from sluice.config.problems import suggestion, told
from sluice.errors import ConfigError, TaskError
from sluice.tasks.base import MISSING, Row, TaskSource, Tokenizer, listed
from sluice.tasks.checks import check_task_settings, is_changed
from sluice.tasks.dataset_filter import DatasetFilter
from sluice.tasks.domain_tasks import DomainTasks
from sluice.tasks.labels import Labels
from sluice.tasks.reasoning_gym import shared_rows
from sluice.tasks.report import REASONS, LoadReport, SourceReport
from sluice.tasks.sources import Part, build_source, data_seed, id_prefixes, name_of
from sluice.tasks.task_list import TaskList
from sluice.tasks.templates import PromptWriter
from sluice.types import Task

VERIFIERS_THAT_COMPARE: Final = frozenset({"exact", "numeric", "math_verify"})
"""Built-in verifiers that always compare with `Task.answer`: they cannot score a row without one."""

_TOKENIZED_AT_ONCE: Final = 1024  # prompts in one call of the tokenizer: fast tokenizers gain nothing from more
_NOT_ASKED: Final = ""  # stands for the domain of rows that were dropped whatever theirs is


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTasks:
    """What a run samples from and is evaluated on."""

    train: TaskSource  # `DomainTasks` where `domain_interleave_probs` is set, else a `TaskList`
    validation: tuple[Task, ...]  # empty when none is configured
    report: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A row that passed everything that can be asked without a tokenizer."""

    row: Row
    domain: str
    tag: str | None
    answer: str | None


@dataclass(slots=True, kw_only=True)
class _Tally:
    """One source on its way: what is left of it, and where the rest went."""

    part: Part
    key: str
    name: str
    settings: TaskSourceConfig
    prefix: str  # of its task_ids
    rows: int = 0
    candidates: list[_Candidate] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    drops: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reason, domain) -> rows
    duplicates: int = 0
    lengths: list[tuple[int, str]] = field(default_factory=list)  # (tokens, domain) of every prompt that was tokenised
    unknown_tokens: int = 0  # kept prompts with a token for what the vocabulary lacks

    def dropped(self, domain: str | None = None) -> Counter[str]:
        """Reason -> rows, of one domain or of all."""
        counts: Counter[str] = Counter()
        for (reason, its_domain), rows in self.drops.items():
            if domain in (None, its_domain):
                counts[reason] += rows
        return counts


def build_tasks(config: RlvrConfig, tokenizer: Tokenizer) -> LoadedTasks:
    """Load, filter and tokenise the data of a run. `tokenizer` is the policy's.

    Raises `ConfigError` for settings (see `check_task_settings`), `TaskError` for data: unreadable, empty, with rows that lead to no reward
    domain, or with nothing left to train on or to evaluate; the message says where the rows went.
    """
    check_task_settings(config)
    writer = PromptWriter(config.tasks, tokenizer, tokenizer_place=config.model.path)
    labels = Labels(config.rewards)
    train = _read("train", config.tasks.train, config, labels, writer)
    validation = _read("validation", config.tasks.validation, config, labels, writer)
    labels.require_known()

    room = config.dataset_filter.num_samples or None
    for tally in train:
        _make_tasks(tally, config, writer, tokenizer, limit=room)
        room = None if room is None else room - len(tally.tasks)
    _require_tasks(train, config, "to train on")
    for domain in config.domain_interleave_probs or ():
        _require_domain(train, config, domain)

    for tally in validation:
        _make_tasks(tally, config, writer, tokenizer, limit=None)
    overlaps = _overlaps(config)
    if config.tasks.exclude_train_from_validation:
        _drop_known(validation, {task.prompt for tally in train for task in tally.tasks})
    if config.validation.max_items is not None:
        _keep_some_of_each(validation, config.validation.max_items)
    if validation:
        _require_tasks(validation, config, "to evaluate", *overlaps)

    for part in (train, validation):
        _count_duplicates(part)
    return LoadedTasks(
        train=_task_source([task for tally in train for task in tally.tasks], config),
        validation=tuple(task for tally in validation for task in tally.tasks),
        report=LoadReport(
            sources=tuple(_report(tally) for tally in (*train, *validation)),
            warnings=(*_warnings(train, validation, config, labels, writer), *overlaps),
        ),
    )


def _task_source(tasks: Sequence[Task], config: RlvrConfig) -> TaskSource:
    settings: dict[str, Any] = {"seed": config.seed, "epochs": config.tasks.epochs, "shuffle": config.tasks.shuffle}
    if config.domain_interleave_probs is None:
        return TaskList(tasks, **settings)
    return DomainTasks(tasks, config.domain_interleave_probs, **settings)


def _read(part: Part, sources: Sequence[TaskSourceConfig], config: RlvrConfig, labels: Labels, writer: PromptWriter) -> list[_Tally]:
    """Read every source of one part; what is left are candidates with their domain and answer."""
    dataset_filter = DatasetFilter(config.dataset_filter) if part == "train" else None
    shares = config.domain_interleave_probs if part == "train" else None
    comparing = {domain for domain, reward in config.rewards.items() if _compares(reward.verifier)}
    tallies = []
    for index, (settings, prefix) in enumerate(zip(sources, id_prefixes(part, sources), strict=True)):
        tally = _Tally(part=part, key=f"tasks.{part}.{index}", name=name_of(settings), settings=settings, prefix=prefix)
        place = f"{tally.key} ({tally.name})"
        has_answers = False
        row: Row | None = None
        for row in build_source(settings, part, index).rows():
            tally.rows += 1
            has_answers = has_answers or row.answer is not MISSING
            reason = None if dataset_filter is None else dataset_filter.reason_to_drop(row, tally.name)
            if reason is not None:
                tally.drops[reason, _NOT_ASKED] += 1
                continue
            label = labels.find(row, place, settings.domain)
            if label is None:
                continue
            domain, tag = label
            if shares is not None and domain not in shares:
                tally.drops["no_share", domain] += 1
                continue
            if not writer.has_prompt(row, prompt_field=settings.prompt_field):
                tally.drops["empty_prompt", domain] += 1
                continue
            answer = _answer(row, settings.answer_field, is_compared=domain in comparing)
            if answer is None and domain in comparing:
                tally.drops["missing_answer", domain] += 1
            else:
                tally.candidates.append(_Candidate(row=row, domain=domain, tag=tag, answer=answer))
        if row is None:
            raise TaskError(f"{place}: expected rows, but {settings.path or settings.name} is empty")
        if not has_answers and is_changed(settings, "answer_field"):
            fields = [str(name) for name in row.entry]
            near = suggestion(settings.answer_field, fields, what="there are")
            raise ConfigError(f"{tally.key}.answer_field: expected a field of the data, got '{settings.answer_field}'{near}")
        tallies.append(tally)
    return tallies


def _compares(verifier: VerifierConfig) -> bool:
    """Whether a verifier compares the response with `Task.answer`."""
    return verifier.type in VERIFIERS_THAT_COMPARE or (verifier.type == "regex" and "(?P<answer>" in str(verifier.args.get("pattern")))


def _answer(row: Row, answer_field: str, *, is_compared: bool) -> str | None:
    """The reference answer as text, numbers as Python writes them; None when the row has none: null, NaN or an infinity, or blank
    where it is compared.

    Where text is compared, true and false are refused, since "True", "true" and "1" are different answers, and so are lists and mappings.
    A verifier that does not compare finds such a value in `Task.entry`.
    """
    value = row.answer
    if isinstance(value, str):
        return str(value) if value.strip() or not is_compared else None
    if value is MISSING or value is None or value != value:  # noqa: PLR0124 - NaN stands for a missing value in tables
        return None
    if isinstance(value, float | Decimal) and not math.isfinite(value):  # as NaN: what is left of a division by 0 equals no response
        return None
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    if is_compared:
        raise TaskError(
            f"{row.where}: expected text or a number in field '{answer_field}', which the verifier of its domain compares, "
            f"got {told(value)} - write it as text, or use a verifier that reads the row itself"
        )
    return None


def _make_tasks(tally: _Tally, config: RlvrConfig, writer: PromptWriter, tokenizer: Tokenizer, *, limit: int | None) -> None:
    """Turn the candidates of one source into tasks, at most `limit` of them (`num_samples`)."""
    candidates, tally.candidates = tally.candidates, []
    unknown = tokenizer.unk_token_id
    for start in range(0, len(candidates), _TOKENIZED_AT_ONCE):
        if limit is not None and len(tally.tasks) >= limit:
            tally.drops.update(("num_samples", candidate.domain) for candidate in candidates[start:])
            return
        batch = candidates[start : start + _TOKENIZED_AT_ONCE]
        texts = [writer.write(candidate.row, prompt_field=tally.settings.prompt_field) for candidate in batch]
        written = [(candidate, text) for candidate, text in zip(batch, texts, strict=True) if text]
        tally.drops.update(("empty_prompt", candidate.domain) for candidate, text in zip(batch, texts, strict=True) if not text)
        all_ids = writer.tokenize([text for _, text in written], [candidate.row for candidate, _ in written])
        for (candidate, text), ids in zip(written, all_ids, strict=True):
            if len(ids) == 0:
                tally.drops["empty_prompt", candidate.domain] += 1
                continue
            tally.lengths.append((len(ids), candidate.domain))
            if len(ids) > config.prompt_length:
                tally.drops["prompt_too_long", candidate.domain] += 1
            elif limit is not None and len(tally.tasks) >= limit:
                tally.drops["num_samples", candidate.domain] += 1
            else:
                tally.unknown_tokens += unknown is not None and bool((ids == unknown).any())
                tally.tasks.append(
                    Task(
                        task_id=f"{tally.prefix}{candidate.row.index}",
                        domain=candidate.domain,
                        prompt=text,
                        prompt_ids=ids,
                        answer=candidate.answer,
                        entry=candidate.row.entry,
                        tag=candidate.tag,
                        difficulty=candidate.row.difficulty,
                    )
                )


def _drop_known(tallies: Sequence[_Tally], prompts: set[str]) -> None:
    """Leave out tasks whose prompt is among `prompts`, in whatever domain."""
    for tally in tallies:
        unseen = [task for task in tally.tasks if task.prompt not in prompts]
        tally.drops["in_train", _NOT_ASKED] += len(tally.tasks) - len(unseen)
        tally.tasks = unseen


def _keep_some_of_each(tallies: Sequence[_Tally], limit: int) -> None:
    """Keep `limit` tasks in all, the first ones of every source in turn, so that every source is represented as evenly as it can be."""
    turns = sorted((position, index) for index, tally in enumerate(tallies) for position in range(len(tally.tasks)))
    shares = Counter(index for _, index in turns[:limit])
    for index, tally in enumerate(tallies):
        tally.drops["max_items", _NOT_ASKED] += len(tally.tasks) - shares[index]
        tally.tasks = tally.tasks[: shares[index]]


def _count_duplicates(tallies: Sequence[_Tally]) -> None:
    """Count the tasks whose prompt a task before them in the same domain has too."""
    seen: set[tuple[str, str]] = set()
    for tally in tallies:
        for task in tally.tasks:
            tally.duplicates += (task.domain, task.prompt) in seen
            seen.add((task.domain, task.prompt))


def _require_tasks(tallies: Sequence[_Tally], config: RlvrConfig, purpose: str, *hints: str) -> None:
    """Raise `TaskError` when nothing is left: how many rows were read, and where each went."""
    if any(tally.tasks for tally in tallies):
        return
    raise TaskError(
        ". ".join(
            (
                f"tasks.{tallies[0].part}: expected at least one prompt {purpose}, but of {sum(tally.rows for tally in tallies)} rows "
                f"({listed(tally.name for tally in tallies)}) none is left: {_drop_stories(tallies, config)}",
                *hints,
            )
        )
    )


def _require_domain(tallies: Sequence[_Tally], config: RlvrConfig, domain: str) -> None:
    """Raise `TaskError` when nothing is left of a domain that has a share in the batch: where its rows went."""
    if any(task.domain == domain for tally in tallies for task in tally.tasks):
        return
    sources = listed(tally.name for tally in tallies)
    rows = sum(tally.dropped(domain).total() for tally in tallies)
    own = f"of its {rows} rows ({sources}) none is left: {_drop_stories(tallies, config, domain)}"
    others = _drop_stories(tallies, config, _NOT_ASKED)
    raise TaskError(
        f"domain_interleave_probs.{domain}: expected at least one prompt of this domain to train on, but "
        + (own if rows else f"no row of tasks.train ({sources}) has its label")
        + (f". Rows dropped before their label was read: {others}" if others else "")
        + " - correct the data or what drops them, or take the share of this domain away"
    )


def _drop_stories(tallies: Sequence[_Tally], config: RlvrConfig, domain: str | None = None) -> str:
    """Where rows went, of one domain or of all: each reason with its count and what it means."""
    dropped: Counter[str] = sum((tally.dropped(domain) for tally in tallies), Counter())
    shortest = min((length for tally in tallies for length, its_domain in tally.lengths if domain in (None, its_domain)), default=0)
    story = dict(REASONS)
    story["prompt_too_long"] = (
        f"more than prompt_length {config.prompt_length} tokens, the shortest has {shortest} - raise prompt_length to at least that"
    )
    return "; ".join(f"{dropped[reason]} {reason} ({story[reason]})" for reason in REASONS if dropped[reason])


def _overlaps(config: RlvrConfig) -> tuple[str, ...]:
    """Warnings about validation data that reasoning-gym makes from the seeds of training data."""
    found = []
    for index, held_out in enumerate(config.tasks.validation):
        for other_index, other in enumerate(config.tasks.train):
            own_seed, seed = data_seed(held_out, "validation", index), data_seed(other, "train", other_index)
            rows = shared_rows(held_out, own_seed, other, seed)
            if rows:
                found.append(
                    f"tasks.validation.{index}.seed {own_seed} makes {rows} rows alike with tasks.train.{other_index} (seed {seed}): "
                    f"reasoning-gym makes row k from seed + k - choose a seed farther away than the sizes, or none"
                )
    return tuple(found)


def _warnings(
    train: Sequence[_Tally], validation: Sequence[_Tally], config: RlvrConfig, labels: Labels, writer: PromptWriter
) -> Iterator[str]:
    present = {task.domain for tally in train for task in tally.tasks}
    for domain, reward in config.rewards.items():
        left_out = sum(tally.drops["no_share", domain] for tally in train)
        if left_out:
            yield f"rewards.{domain}: {left_out} training rows are left out, since domain_interleave_probs gives this domain no share"
        elif domain not in present:
            yield f"rewards.{domain}: no training prompt belongs to this domain - check the labels in the data and its tag_included"
        for tag in reward.tag_included:
            if tag not in labels.seen:
                yield f"rewards.{domain}.tag_included: no row is labelled '{tag}'"
    for tally in validation:
        dropped = tally.dropped()
        unusable = {reason: dropped[reason] for reason in ("missing_answer", "empty_prompt", "prompt_too_long")}
        if any(unusable.values()):
            counts = ", ".join(f"{count} {reason} ({REASONS[reason]})" for reason, count in unusable.items() if count)
            yield f"{tally.key} ({tally.name}): {sum(unusable.values())} of {tally.rows} held-out rows are not evaluated: {counts}"
    for tally in (*train, *validation):
        if tally.unknown_tokens:
            yield (
                f"{tally.key} ({tally.name}): {tally.unknown_tokens} prompts hold text that the tokenizer of {config.model.path} "
                f"does not know - the policy sees its unknown token there"
            )
    if writer.end_tokens_taken_off:
        yield f"the tokenizer of {config.model.path} appends its end token: it was taken off {writer.end_tokens_taken_off} prompts"


def _report(tally: _Tally) -> SourceReport:
    dropped = tally.dropped()
    return SourceReport(
        part=tally.part,
        key=tally.key,
        source=tally.name,
        rows=tally.rows,
        kept=len(tally.tasks),
        dropped={reason: dropped[reason] for reason in REASONS if dropped[reason]},
        domains=dict(Counter(task.domain for task in tally.tasks)),
        duplicates=tally.duplicates,
        shortest_prompt=min((length for length, _ in tally.lengths), default=None),
        longest_prompt=max((length for length, _ in tally.lengths), default=None),
    )
