"""Where every row of the data went: counted by source and reason when the tasks are built, so that nothing is lost unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sluice.tasks.sources import Part

REASONS: Final[Mapping[str, str]] = {
    "source": "their source is not in dataset_filter.source",
    "no_difficulty": "no number in field 'difficulty', which dataset_filter bounds",
    "difficulty": "difficulty outside the bounds of dataset_filter",
    "no_share": "their domain has no share in domain_interleave_probs",
    "empty_prompt": "the prompt is empty",
    "missing_answer": "no answer, which the verifier of their domain needs",
    "prompt_too_long": "more tokens than prompt_length",
    "in_train": "the same prompt is in the training data",
    "num_samples": "beyond dataset_filter.num_samples",
    "max_items": "beyond validation.max_items",
}
"""Why a row is left out, in the order in which the questions are asked: the first that applies is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source: rows == kept + sum(dropped.values())."""

    part: Part
    key: str  # path of its settings: "tasks.train.0"
    source: str  # its name, as dataset_filter.source knows it
    rows: int  # read
    kept: int  # became tasks
    dropped: Mapping[str, int]  # reason (a key of REASONS) -> rows
    domains: Mapping[str, int]  # reward domain -> kept rows
    duplicates: int  # kept rows whose prompt a kept row before it in this part and domain has too
    shortest_prompt: int | None  # tokens, of all its prompts that were tokenised, dropped ones included; None: none was
    longest_prompt: int | None

    def line(self) -> str:
        """One line for a person."""
        domains = ", ".join(f"{domain} {count}" for domain, count in self.domains.items())
        dropped = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        parts = [f"{self.key} {self.source}: {self.rows} rows, {self.kept} kept" + (f" ({domains})" if domains else "")]
        if dropped:
            parts.append(f"dropped: {dropped}")
        if self.duplicates:
            parts.append(f"{self.duplicates} duplicates kept")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All sources, and what the user should know."""

    sources: tuple[SourceReport, ...]
    warnings: tuple[str, ...]  # each names the setting to change

    def rows(self, part: Part) -> int:
        """Rows read."""
        return sum(source.rows for source in self.sources if source.part == part)

    def kept(self, part: Part) -> int:
        """Rows that became tasks."""
        return sum(source.kept for source in self.sources if source.part == part)

    def dropped(self, part: Part) -> dict[str, int]:
        """Reason -> rows, in the order of REASONS; reasons without rows are left out."""
        total: Counter[str] = Counter()
        for source in self.sources:
            if source.part == part:
                total.update(source.dropped)
        return {reason: total[reason] for reason in REASONS if total[reason]}

    def duplicates(self, part: Part) -> int:
        """Kept rows whose prompt was kept before."""
        return sum(source.duplicates for source in self.sources if source.part == part)

    def lines(self) -> tuple[str, ...]:
        """One line per source, then the warnings."""
        return (*(source.line() for source in self.sources), *(f"warning: {warning}" for warning in self.warnings))

    def metrics(self) -> dict[str, float]:
        """tasks/<part>/rows, kept, duplicates and dropped/<reason>, as counts."""
        metrics: dict[str, float] = {}
        parts: tuple[Part, ...] = ("train", "validation")
        for part in parts:
            metrics[f"tasks/{part}/rows"] = self.rows(part)
            metrics[f"tasks/{part}/kept"] = self.kept(part)
            metrics[f"tasks/{part}/duplicates"] = self.duplicates(part)
            metrics.update({f"tasks/{part}/dropped/{reason}": count for reason, count in self.dropped(part).items()})
        return metrics
