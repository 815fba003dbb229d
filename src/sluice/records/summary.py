"""What came out of a run, read from its run.db, and the lines that tell it to the person who started it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.execution.validation import ValidationResult
from sluice.records.gate_lines import LABEL, TaskTypeTotal, gate_lines, in_columns, read_gate
from sluice.records.rundb import SECONDS_AWAY, facts_in, open_for_reading
from sluice.types import EMPTY, Category

ENGINE_TOKENS = "engine_tokens"
"""Fact: tokens sampled for training by the engine's own count, against which the ledger must sum."""

MAX_STEPS = "max_steps"
"""Fact: optimiser steps that were asked for."""

# Outcomes that are not named here come after these.
_OUTCOME_ORDER = ("trained", "dropped", "cut", "rejected", "expired", "failed", "cancelled", "surplus", "discarded", "lost", "late", "open")
_WORDS = {"lost": "lost to kills"}  # outcomes that need more than their name


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTotal:
    """Groups that left the same way."""

    outcome: str
    category: Category | None  # None unless dropped or cut
    reason: str
    groups: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotal:
    """Where tokens and attempts ended."""

    outcome: str
    tokens: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One held-out evaluation."""

    step: int  # optimiser steps done before it
    results: Mapping[str, ValidationResult]  # by domain


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in figures, as far as it has got."""

    run_db: Path
    status: str  # "running" also of a run that was killed
    seconds: float  # from its creation to its end, or to its last heartbeat; time between a death and a resume left out
    steps: int  # optimiser steps done
    max_steps: int | None  # None: the run did not say
    requested: int  # groups asked for, all batches together
    kept: int  # groups that came
    useful_groups: int  # with at least one non-zero advantage
    useful_tokens: int  # of rollouts with non-zero advantage
    groups: tuple[GroupTotal, ...]  # by outcome, most frequent reason first
    ledger: tuple[LedgerTotal, ...]  # by outcome
    engine_tokens: int | None  # None: the run did not say
    before: Evaluation | None  # the first; None: there was none
    after: Evaluation | None  # the latest; None: there was no second one
    warnings: int
    errors: int
    gate: Mapping[str, float] = field(default_factory=lambda: EMPTY)  # its newest metrics without `gate/`; empty: there is no gate
    task_types: tuple[TaskTypeTotal, ...] = ()  # most frequent first; only where there is a gate

    @property
    def tokens(self) -> int:
        """Tokens generated for training, by the ledger."""
        return sum(total.tokens for total in self.ledger)

    @property
    def launched(self) -> int:
        """Groups that were launched and have left."""
        return sum(total.groups for total in self.groups)


def read_summary(run_db: Path) -> RunSummary:
    """Read a run, also one that goes on or was killed: all figures are of one moment.

    Raises:
        RecordError: the file is missing, not ours, or of another schema version.
    """
    with open_for_reading(run_db) as db:
        facts = facts_in(db)
        steps, requested, kept, useful_groups, useful_tokens = (
            int(total)
            for total in db.execute(
                "SELECT total(kept > 0), total(requested), total(kept), total(useful_groups), total(useful_tokens) FROM batches"
            ).fetchone()
        )
        groups = [
            GroupTotal(outcome=outcome, category=category, reason=reason, groups=count, tokens=tokens)
            for outcome, category, reason, count, tokens in db.execute(
                "SELECT outcome, category, reason, count(*) AS n, sum(sampled_tokens) FROM groups GROUP BY 1, 2, 3 ORDER BY n DESC, 1, 2, 3"
            )
        ]
        ledger = [
            LedgerTotal(outcome=outcome, tokens=tokens, attempts=attempts)
            for outcome, tokens, attempts, _ in db.execute("SELECT outcome, tokens, attempts, max(rowid) FROM ledger GROUP BY outcome")
        ]  # SQLite takes the other columns from the row of the maximum
        first, latest = (_read_evaluation(db.execute(sql)) for sql in (_FIRST_EVALUATION, _LATEST_EVALUATION))
        gate, task_types = read_gate(db)
        levels: dict[str, int] = dict(db.execute("SELECT level, count(*) FROM events GROUP BY level").fetchall())
    return RunSummary(
        run_db=run_db,
        status=facts["status"],
        seconds=seconds_until(facts.get("ended", facts["heartbeat"]), facts),
        steps=steps,
        max_steps=facts.get(MAX_STEPS),
        requested=requested,
        kept=kept,
        useful_groups=useful_groups,
        useful_tokens=useful_tokens,
        groups=tuple(sorted(groups, key=lambda total: _outcome_order(total.outcome))),
        ledger=tuple(sorted(ledger, key=lambda total: _outcome_order(total.outcome))),
        engine_tokens=facts.get(ENGINE_TOKENS),
        before=first,
        after=latest,
        warnings=levels.get("warning", 0),
        errors=levels.get("error", 0),
        gate=gate,
        task_types=task_types,
    )


def seconds_until(moment: float, facts: Mapping[str, Any]) -> float:
    """How long the run had gone on by then (wall-clock seconds), without the time it lay dead."""
    return float(max(0.0, moment - facts["created"] - facts.get(SECONDS_AWAY, 0.0)))


_EVALUATION = "SELECT step, domain, items, scored, reward_sum, unscored, truncated, sampled_tokens FROM validation WHERE evaluation = "
_FIRST_EVALUATION = _EVALUATION + "(SELECT min(evaluation) FROM validation) ORDER BY rowid"
_LATEST_EVALUATION = _EVALUATION + "(SELECT nullif(max(evaluation), min(evaluation)) FROM validation) ORDER BY rowid"


def _read_evaluation(rows: Iterable[tuple[Any, ...]]) -> Evaluation | None:
    step = None
    results = {}
    for step, domain, items, scored, reward_sum, unscored, truncated, sampled_tokens in rows:  # noqa: B007 - all rows have the same step
        results[domain] = ValidationResult(
            items=items,
            scored=scored,
            reward_sum=reward_sum,
            unscored=json.loads(unscored),
            truncated=truncated,
            sampled_tokens=sampled_tokens,
        )
    return None if step is None else Evaluation(step=step, results=results)


def _outcome_order(outcome: str) -> tuple[int, str]:
    return (_OUTCOME_ORDER.index(outcome) if outcome in _OUTCOME_ORDER else len(_OUTCOME_ORDER), outcome)


def _in_words(outcome: str) -> str:
    return _WORDS.get(outcome, outcome)


def over_all(results: Iterable[ValidationResult]) -> ValidationResult:
    """One result over several domains: every scored item weighs the same."""
    results = tuple(results)
    unscored: dict[str, int] = {}
    for result in results:
        for reason, count in result.unscored.items():
            unscored[reason] = unscored.get(reason, 0) + count
    return ValidationResult(
        items=sum(r.items for r in results),
        scored=sum(r.scored for r in results),
        reward_sum=math.fsum(r.reward_sum for r in results),
        unscored=unscored,
        truncated=sum(r.truncated for r in results),
        sampled_tokens=sum(r.sampled_tokens for r in results),
    )


# ---------------------------------------------------------------- the final printout


def summary_lines(summary: RunSummary) -> list[str]:
    """The final printout of a run: plain ASCII lines without a newline, at most 80 columns but for long paths and names."""
    parts = (
        _headline(summary),
        _validation_lines(summary),
        _token_lines(summary),
        _group_lines(summary),
        gate_lines(summary.gate, summary.task_types),
        _result_lines(summary),
    )
    lines: list[str] = []
    for part in parts:
        lines += [*([""] if lines and part else []), *part]
    return lines


def _headline(s: RunSummary) -> list[str]:
    of = f" of {s.max_steps:,}" if s.max_steps is not None else ""
    lines = [f"Run {s.status} after {s.steps:,}{of} steps in {clock_time(s.seconds)}"]
    if s.kept != s.requested:
        lines.append(f"  {s.requested - s.kept:,} of {s.requested:,} requested groups did not come: some batches were short")
    counts = [f"{n:,} {word}{'s' if n != 1 else ''}" for n, word in ((s.errors, "error"), (s.warnings, "warning")) if n]
    if counts:
        lines.append(f"  {' and '.join(counts)}: see the table events in run.db")
    return lines


def _validation_lines(s: RunSummary) -> list[str]:
    if s.before is None:
        return []
    before = dict(s.before.results)
    after = dict(s.after.results) if s.after is not None else {}
    if len(before) > 1:
        before["mean"] = over_all(s.before.results.values())
        if s.after is not None:
            after["mean"] = over_all(s.after.results.values())
    lines = [f"{'Held-out reward':<{LABEL}}  before   after  change   items"]
    for domain, first in before.items():
        latest = after.get(domain)
        change = f"{latest.mean - first.mean:+.3f}" if latest and latest.mean is not None and first.mean is not None else "-"
        unscored = max(r.items - r.scored for r in (first, latest) if r is not None)
        note = f"  ({unscored:,} not scored)" if unscored else ""
        lines.append(f"  {domain:<{LABEL - 2}} {_mean(first):>7} {_mean(latest):>7} {change:>7} {first.items:>7,}{note}")
    return lines


def _token_lines(s: RunSummary) -> list[str]:
    lines = [count_row("Tokens generated", s.tokens, note=_against_engine(s))]
    lines += [count_row(f"  {_in_words(total.outcome)}", total.tokens, s.tokens) for total in s.ledger if total.tokens]
    if s.engine_tokens is not None and s.engine_tokens != s.tokens:
        lines.append(count_row("  not in the ledger", s.engine_tokens - s.tokens, note="(please report it)"))
    if s.tokens:
        lines.append(count_row("Useful tokens", s.useful_tokens, s.tokens, note="(non-zero advantage)"))
    if s.useful_groups:
        lines.append(count_row("Tokens per useful group", round(s.tokens / s.useful_groups), note=f"({s.useful_groups:,} useful groups)"))
    return lines


def _against_engine(s: RunSummary) -> str:
    if s.engine_tokens is None:
        return ""
    if s.engine_tokens == s.tokens:
        return f"= {s.engine_tokens:,} counted by the engine"
    return f"BUT {s.engine_tokens:,} counted by the engine"


def _group_lines(s: RunSummary) -> list[str]:
    lines = [count_row("Groups launched", s.launched)]
    for outcome in dict.fromkeys(total.outcome for total in s.groups):
        totals = [total for total in s.groups if total.outcome == outcome]
        lines.append(count_row(f"  {_in_words(outcome)}", sum(total.groups for total in totals), s.launched))
        if outcome != "trained":
            lines += [count_row(f"    {_name(total)}", total.groups, s.launched) for total in totals]
    return lines


def _result_lines(s: RunSummary) -> list[str]:
    folder = s.run_db.parent
    places = (("Trained model", folder / "model"), ("Metrics", folder / "metrics.jsonl"), ("TensorBoard", folder / "tensorboard"))
    return [f"{'Results':<14} {folder}", *(f"  {word:<12} {path}" for word, path in places if path.exists())]


def count_row(label: str, count: int, whole: int | None = None, note: str = "") -> str:
    """A line of a printout: what, how many, and which share of the whole."""
    share = f"{count / whole:8.1%}" if whole else ""
    return f"{in_columns(label, f'{count:,}')}{share}  {note}".rstrip()


def _name(total: GroupTotal) -> str:
    return f"{total.category}/{total.reason}" if total.category else total.reason


def _mean(result: ValidationResult | None) -> str:
    return "-" if result is None or result.mean is None else f"{result.mean:.3f}"


def clock_time(seconds: float) -> str:
    """Seconds as 0:07, 6:21 or 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
