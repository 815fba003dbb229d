"""Which reward domain a row belongs to: by its source's `domain`, else by the row's own `domain`, else by its `tag`.

A label is a domain's name or one of the labels in its `tag_included`. A label that is neither is never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sluice.config.models import RewardConfig
from sluice.config.problems import suggestion, told
from sluice.errors import TaskError
from sluice.tasks.base import Row, listed

_LABELS_TOLD: Final = 10  # unknown labels that a message describes; the others are counted


class Labels:
    """The table from label to domain, and a memory of the labels that it does not hold."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._domains = tuple(rewards)
        self._domain_of = {name: name for name in rewards}
        for domain, reward in rewards.items():
            self._domain_of.update(dict.fromkeys(reward.tag_included, domain))
        self._unknown: dict[tuple[str, str | None], int] = {}  # (source, label) -> rows
        self.seen: set[str] = set()  # labels that rows carried

    def find(self, row: Row, source: str, source_domain: str | None) -> tuple[str, str | None] | None:
        """(domain, tag) of a row; the tag is None when the label is the domain's own name.

        None for a row without a known label: it is remembered under `source`, and `require_known` raises. Raises `TaskError` for a label
        that is no text.
        """
        label = source_domain if source_domain is not None else _label_of(row)
        if label is not None:
            self.seen.add(label)
            domain = self._domain_of.get(label)
            if domain is not None:
                return domain, None if label == domain else label
        self._unknown[source, label] = self._unknown.get((source, label), 0) + 1
        return None

    def require_known(self) -> None:
        """Raise `TaskError` when rows had no label that leads to a domain: which labels, of which source, and how many rows."""
        if not self._unknown:
            return
        stories = []
        for (source, label), rows in list(self._unknown.items())[:_LABELS_TOLD]:
            if label is None:
                stories.append(f"{rows} rows of {source} have no label - set its `domain`, or a field `domain` or `tag` in the data")
            else:
                stories.append(f"{rows} rows of {source} have the label '{label}'{suggestion(label, self._domain_of, what='labels')}")
        if len(self._unknown) > _LABELS_TOLD:
            stories.append(f"{len(self._unknown) - _LABELS_TOLD} more labels")
        raise TaskError(
            f"expected every row to belong to a domain of `rewards` ({listed(self._domains)}), got others: {'; '.join(stories)} - "
            f"add a section rewards.<label>, or the label to rewards.<domain>.tag_included"
        )


def _label_of(row: Row) -> str | None:
    for field, label in (("domain", row.domain), ("tag", row.tag)):
        if label is None or label == "":
            continue
        if not isinstance(label, str):
            raise TaskError(f"{row.where}: expected text in field '{field}', the label of a reward domain, got {told(label)}")
        return label
    return None
