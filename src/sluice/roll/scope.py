"""Which group the running code belongs to, so that plain functions such as `query_filter(data_list, config)` find it.

A context variable holds it: tasks that a loop starts inherit it, and loops of other groups do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from sluice.types import Verdict

if TYPE_CHECKING:
    from sluice.roll.data import DataProto


class GroupInHand(Protocol):
    """A group that a loop is making."""

    def judge(self, rows: Sequence[DataProto], config: object) -> Verdict:
        """What the query filter says to these responses, of one row each. The verdict is kept: the group has been judged."""


current: Final[ContextVar[GroupInHand | None]] = ContextVar("sluice_roll_group", default=None)
"""The group whose loop is running; None outside of loops."""
