"""From rows to whole groups: what is a duplicate, what is partial, and what is refused. The counts are told to the reader.

- Rows that say the same twice are counted once; rows of one member that differ are an error.
- A group with fewer members than the others is partial, and is left out; one with more is an error.
- A group in which a member has no reward is left out: nobody knows how it would have ended.
- A group that stands in two files under one id is an error, since it may be one group or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.analysis.trajectories import Member, TrajectoryGroup
from sluice.errors import AnalysisError


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """What was read and is not used, by reason; in the order in which it was first met."""

    counts: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)  # what is used, and is worth a word all the same

    def add(self, reason: str, number: int = 1) -> None:
        """One more."""
        self.counts[reason] += number

    def add_note(self, what: str) -> None:
        """One more of what is used all the same."""
        self.seen[what] += 1

    @property
    def lines(self) -> tuple[str, ...]:
        """For a person."""
        out = [f"left out: {number} {reason}" for reason, number in self.counts.items() if number]
        return (*out, *(f"{number} {what}" for what, number in self.seen.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One trajectory as it was read."""

    place: str  # file and row, for errors
    name: str | None  # of the member; None: the rows have no names
    member: Member
    has_reward: bool  # False: nobody knows what it earned


@dataclass(slots=True, kw_only=True)
class GroupRows:
    """The rows of one group as they were read."""

    source: str  # the file or run
    task_type: str | None = None
    rows: list[MemberRow] = field(default_factory=list)


def collect(found: Mapping[str, GroupRows], expected_size: int | None, left_out: LeftOut) -> list[TrajectoryGroup]:
    """The whole groups. `expected_size`: where it is known; None: the size that most groups have.

    Raises:
        AnalysisError: a member stands there twice and differently, a group is too large, or most groups have another size.
    """
    members = {key: _without_duplicates(key, group, left_out) for key, group in found.items()}
    size = expected_size or _usual_size(members)
    groups = []
    for key, rows in members.items():
        if len(rows) > size:
            raise AnalysisError(
                f"{rows[0].place}: expected groups of {size} members, got {len(rows)} in group {key} - take the redundant ones out, or "
                "analyse groups of each size apart: thresholds do not carry over"
            )
        if len(rows) < size:
            left_out.add(f"partial groups (fewer than {size} members)")
        elif not all(row.has_reward for row in rows):
            left_out.add("groups with a member without reward")
        elif sum(row.member.reward is not None for row in rows) < 2:
            left_out.add("groups in which fewer than two rewards count")
        else:
            ordered = sorted(rows, key=_order)
            groups.append(TrajectoryGroup(key=key, members=[row.member for row in ordered], task_type=found[key].task_type))
    if not groups:
        told = "; ".join(left_out.lines) or "there is no group"
        raise AnalysisError(f"expected at least one whole group of {size} with rewards, got none ({told}) - record more")
    return groups


def _without_duplicates(key: str, group: GroupRows, left_out: LeftOut) -> list[MemberRow]:
    """Rows without a member's name are all members: two that did the same cannot be told from one that was written twice."""
    seen: dict[str, MemberRow] = {}
    for row in group.rows:
        if row.name is None:
            return group.rows
        first = seen.setdefault(row.name, row)
        if first is row:
            continue
        if (first.member, first.has_reward) != (row.member, row.has_reward):
            raise AnalysisError(
                f"{row.place}: expected every member once, got member {row.name} of group {key} again, and different from {first.place} - "
                "give every member a name of its own, and every group"
            )
        left_out.add("duplicated rows")
    return [*seen.values()]


def _usual_size(members: Mapping[str, Sequence[MemberRow]]) -> int:
    sizes = Counter(len(rows) for rows in members.values())
    size, number = max(sizes.items(), key=lambda entry: (entry[1], entry[0]))
    if 2 * number <= len(members) and len(sizes) > 1:
        told = ", ".join(f"{count} of {members}" for members, count in sorted(sizes.items()))
        raise AnalysisError(f"expected most groups to have one size, got {told} members - analyse groups of each size apart")
    if size < 2:
        raise AnalysisError(
            f"expected groups of at least two members, got {number} of one - the group column must name the group, not the trajectory"
        )
    return size


def _order(row: MemberRow) -> tuple[int, str, str]:
    """By number, else by name, else by what it did."""
    name = row.name
    if name is None:
        return (0, "", repr((row.member.actions, row.member.reward, row.member.observations)))
    return (int(name), "", "") if name.isascii() and name.isdigit() else (0, name, "")
