"""Where every attempt and every token ended: each ends exactly once, and the sum equals the engine's own count.

An attempt is `running` until it is settled; a finished member of a group that has not left yet is `open`. From then on it has one outcome:

    trained     in a batch that an optimiser step consumed
    dropped     its whole group was dropped by a verdict
    cut         its whole group was stopped by the gate, finished members and running ones alike
    rejected    the response filter, a missing reward or the truncation policy took it out of its group
    failed      it never delivered
    cancelled   it was stopped before it finished
    expired     its group became too old before a batch took it
    surplus     its group was accepted, but the batch was full
    discarded   it finished, but its group was abandoned (batch full, end of the run)

Steps of environments are counted with the tokens of the same groups, those that have left, so that the two can be compared. Members that
were stopped as futile are ordinary members, and counted besides.

Tokens that an engine sampled for an attempt after it had been let go are `late`: tokens without an attempt. Tokens that a killed process
sampled after its last checkpoint are `lost`: they were paid for, and nothing is left of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

OUTCOMES: Final = ("trained", "dropped", "cut", "rejected", "failed", "cancelled", "expired", "surplus", "discarded")
GROUP_OUTCOMES: Final = ("trained", "dropped", "cut", "cancelled", "expired", "surplus", "discarded")
TOKEN_OUTCOMES: Final = (*OUTCOMES, "late", "lost", "open")


class Ledger:
    """Counts of attempts, groups and sampled tokens by outcome and reason. Pure: told what happened, never asks."""

    __slots__ = (
        "_attempts",
        "_group_reasons",
        "_groups",
        "_rejections",
        "_tokens",
        "attempts_launched",
        "groups_launched",
        "late_results",
        "open_attempts",
        "settled_env_steps",
        "settled_tokens",
        "stopped_attempts",
        "stopped_tokens",
        "useful_groups",
        "useful_tokens",
    )

    def __init__(self) -> None:
        self._attempts = dict.fromkeys(OUTCOMES, 0)
        self._tokens = dict.fromkeys(TOKEN_OUTCOMES, 0)
        self._groups = dict.fromkeys(GROUP_OUTCOMES, 0)
        self._group_reasons: dict[tuple[str, str], int] = {}  # (category, reason) -> dropped and cut groups
        self._rejections: dict[str, int] = {}  # reason -> single members taken out of their group
        self.attempts_launched = 0
        self.groups_launched = 0
        self.open_attempts = 0  # finished, their group has not left
        self.late_results = 0  # results of attempts that had already ended
        self.settled_env_steps = 0  # of groups that have left, all their attempts settled
        self.settled_tokens = 0  # of the same groups
        self.stopped_attempts = 0  # members that were stopped as futile
        self.stopped_tokens = 0  # that these had sampled
        self.useful_groups = 0  # trained groups in which some rollout has a non-zero advantage
        self.useful_tokens = 0  # tokens of trained rollouts with non-zero advantage

    # ------------------------------------------------------------ what happened

    def member_opened(self, tokens: int) -> None:
        """A member finished and waits for its group."""
        self.open_attempts += 1
        self._tokens["open"] += tokens

    def members_left(self, outcome: str, attempts: int, tokens: int) -> None:
        """Open members of a group leave with their group."""
        self.open_attempts -= attempts
        self._tokens["open"] -= tokens
        self._attempts[outcome] += attempts
        self._tokens[outcome] += tokens

    def attempt_ended(self, outcome: str, tokens: int, reason: str | None = None) -> None:
        """A running attempt ends by itself: rejected, failed, cancelled."""
        self._attempts[outcome] += 1
        self._tokens[outcome] += tokens
        if reason is not None:
            self.member_rejected(reason)

    def member_rejected(self, reason: str) -> None:
        """A member was taken out of its group for this reason."""
        self._rejections[reason] = self._rejections.get(reason, 0) + 1

    def tokens_came_late(self, tokens: int) -> None:
        """An engine sampled tokens for an attempt that had already been let go."""
        self._tokens["late"] += tokens

    def tokens_were_lost(self, tokens: int) -> None:
        """A killed process had sampled these after its last checkpoint."""
        self._tokens["lost"] += tokens

    def group_left(self, outcome: str, category: str | None, reason: str) -> None:
        """A launched group leaves."""
        self._groups[outcome] += 1
        if category is not None:
            key = (category, reason)
            self._group_reasons[key] = self._group_reasons.get(key, 0) + 1

    def group_settled(self, tokens: int, env_steps: int) -> None:
        """All attempts of a group that left are settled: what they sampled, and the steps that their environments took."""
        self.settled_tokens += tokens
        self.settled_env_steps += env_steps

    def member_stopped(self, tokens: int) -> None:
        """A member delivered because it was stopped as futile."""
        self.stopped_attempts += 1
        self.stopped_tokens += tokens

    def trained_usefully(self, groups: int, tokens: int) -> None:
        """The trainer reports what of its batch had a non-zero advantage."""
        self.useful_groups += groups
        self.useful_tokens += tokens

    # ------------------------------------------------------------ what it says

    @property
    def attempts(self) -> Mapping[str, int]:
        """Settled attempts by outcome."""
        return self._attempts

    @property
    def tokens(self) -> Mapping[str, int]:
        """Sampled tokens by outcome, `open` ones included. Tokens of attempts still running are not in it yet."""
        return self._tokens

    @property
    def groups(self) -> Mapping[str, int]:
        """Groups that left, by outcome."""
        return self._groups

    @property
    def rejected_groups(self) -> Mapping[tuple[str, str], int]:
        """Dropped and cut groups by (category, reason)."""
        return self._group_reasons

    @property
    def rejected_members(self) -> Mapping[str, int]:
        """Members taken out of their group, by reason."""
        return self._rejections

    @property
    def total_tokens(self) -> int:
        """All sampled tokens accounted for so far."""
        return sum(self._tokens.values())

    @property
    def tokens_per_env_step(self) -> float | None:
        """Tokens sampled for one step of an environment, over the groups that have left. None: no environment took a step."""
        return self.settled_tokens / self.settled_env_steps if self.settled_env_steps else None

    @property
    def running_attempts(self) -> int:
        """Attempts launched and not yet settled."""
        return self.attempts_launched - self.open_attempts - sum(self._attempts.values())

    def metrics(self) -> dict[str, float]:
        """Tokens, attempts and groups by outcome since the start of the run; shares of each whole sum to 1."""
        total = self.total_tokens
        out: dict[str, float] = {"ledger/tokens/total": float(total)}
        for outcome, tokens in self._tokens.items():
            out[f"ledger/tokens/{outcome}"] = float(tokens)
            if total:
                out[f"ledger/token_share/{outcome}"] = tokens / total
        settled, left = sum(self._attempts.values()), sum(self._groups.values())
        for outcome, attempts in self._attempts.items():
            out[f"ledger/attempts/{outcome}"] = float(attempts)
            if settled:
                out[f"ledger/attempt_share/{outcome}"] = attempts / settled
        for outcome, groups in self._groups.items():
            out[f"ledger/groups/{outcome}"] = float(groups)
            if left:
                out[f"ledger/group_share/{outcome}"] = groups / left
        for reason, count in self._rejections.items():
            out[f"ledger/rejected_members/{reason}"] = float(count)
            out[f"ledger/rejected_member_rate/{reason}"] = count / max(1, self.attempts_launched)
        for (category, reason), count in self._group_reasons.items():
            out[f"scheduler/rejected/{category}/{reason}"] = float(count)
            out[f"scheduler/rejected_rate/{category}/{reason}"] = count / left
        if self.settled_env_steps:
            out["ledger/env_steps"] = float(self.settled_env_steps)
            out["ledger/tokens_per_env_step"] = self.settled_tokens / self.settled_env_steps
        if self.stopped_attempts:
            out["ledger/stopped_attempts"] = float(self.stopped_attempts)
            out["ledger/stopped_tokens"] = float(self.stopped_tokens)
        if total:
            out["ledger/useful_token_yield"] = self.useful_tokens / total
        if self.useful_groups:
            out["ledger/tokens_per_useful_group"] = total / self.useful_groups
        return out

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain data."""
        return {
            "attempts": dict(self._attempts),
            "tokens": dict(self._tokens),
            "groups": dict(self._groups),
            "group_reasons": [[category, reason, count] for (category, reason), count in self._group_reasons.items()],
            "rejections": dict(self._rejections),
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved."""
        self._attempts = dict.fromkeys(OUTCOMES, 0) | state["attempts"]
        self._tokens = dict.fromkeys(TOKEN_OUTCOMES, 0) | state["tokens"]
        self._groups = dict.fromkeys(GROUP_OUTCOMES, 0) | state["groups"]
        self._group_reasons = {(category, reason): count for category, reason, count in state["group_reasons"]}
        self._rejections = dict(state["rejections"])
        for name in _COUNTS:
            setattr(self, name, state[name])


_COUNTS: Final = (
    "attempts_launched",
    "groups_launched",
    "late_results",
    "open_attempts",
    "settled_env_steps",
    "settled_tokens",
    "stopped_attempts",
    "stopped_tokens",
    "useful_groups",
    "useful_tokens",
)
