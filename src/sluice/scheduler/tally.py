"""What happened since the last batch was delivered: counts for its metrics, and words for whoever asks why it is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sluice.filters.env_faults import FAILURES, TIMEOUTS
from sluice.types import Batch, Group, Rollout, Verdict

TOP_REASONS: Final = 5  # reasons that a message names
ENVIRONMENT_REASONS: Final = TIMEOUTS | FAILURES  # of members, and of groups where a filter judged them
OBSERVATION_TOO_LONG: Final = "observation_too_long"  # of members: no token was left to write


class Sums(NamedTuple):
    """What the rollouts of one group add to the means."""

    reward: float
    rewards: int  # rollouts with a reward
    tokens: int  # sampled
    rollouts: int

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Sums:
        """Summed up."""
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        return cls(sum(rewards), len(rewards), sum([rollout.sampled_tokens for rollout in rollouts]), len(rollouts))


class Tally:
    """Counts of one batch."""

    __slots__ = (
        "ahead",
        "by_domain",
        "closed",
        "cut",
        "drawn",
        "dropped",
        "empty_tries",
        "guard_kept",
        "is_emptied",
        "judged",
        "kept",
        "launched",
        "launched_before",
        "length_kept",
        "length_launched",
        "members",
        "reasons",
        "reward_kept",
        "reward_launched",
        "shrunk",
        "topped_up",
    )

    def __init__(self) -> None:
        self.launched = 0
        self.launched_before = 0  # of these, in tries of which nothing was kept
        self.drawn = 0  # prompts
        self.empty_tries = 0
        self.topped_up = 0  # low-information groups that were used after all
        self.guard_kept = 0
        self.shrunk = 0  # groups that the ratio guard left out of the batch
        self.cut = 0  # groups that the gate stopped; they are among the dropped ones
        self.closed = 0  # places of the batch that were closed with them
        self.is_emptied = False  # the last place of the batch was, which no batch can do without
        self.ahead = 0  # groups launched beyond the quota
        self.judged = 0
        self.kept = 0
        self.dropped = 0
        self.members: dict[str, int] = {}  # reason -> members taken out of their group
        self.reasons: dict[tuple[str, str], int] = {}  # (category, reason) -> groups
        self.reward_launched: list[float] = [0.0, 0.0]  # sum and number of rewards: of judged groups, and of responses that were taken out
        self.reward_kept: list[float] = [0.0, 0.0]
        self.length_launched: list[float] = [0.0, 0.0]  # sampled tokens and number of the same rollouts
        self.length_kept: list[float] = [0.0, 0.0]
        self.by_domain: dict[str, list[int]] = {}  # domain -> judged, kept

    def group_judged(self, domain: str, sums: Sums | None = None) -> None:
        """A group was judged. sums: of a whole one; None: it was stopped before it was whole."""
        self.judged += 1
        self.by_domain.setdefault(domain, [0, 0])[0] += 1
        if sums is not None:
            _add(self.reward_launched, self.length_launched, sums)

    def group_kept(self, domain: str, sums: Sums) -> None:
        """It stays."""
        self.kept += 1
        self.by_domain.setdefault(domain, [0, 0])[1] += 1
        _add(self.reward_kept, self.length_kept, sums)

    def group_dropped(self, category: str, reason: str) -> None:
        """A group left without being trained."""
        key = (category, reason)
        self.reasons[key] = self.reasons.get(key, 0) + 1
        self.dropped += 1

    def member_rejected(self, reason: str, rollout: Rollout | None = None) -> None:
        """A response was taken out of its group, or never came (None). What it earned stays in the means of what was launched."""
        self.members[reason] = self.members.get(reason, 0) + 1
        if rollout is not None and rollout.reward is not None:
            _add(self.reward_launched, self.length_launched, Sums.of((rollout,)))

    def use_after_all(self, group: Group, verdict: Verdict) -> None:
        """A group that was dropped tops the batch up: it counts as kept."""
        self.dropped -= 1
        self.reasons[str(verdict.category), verdict.reason] -= 1
        self.topped_up += 1
        self.group_kept(group.task.domain, Sums.of(group.rollouts))

    def metrics(self, batch: Batch, step: int, *, has_gate: bool = False) -> dict[str, float]:
        """The metrics of the filling of a batch."""
        ages = [step - group.policy_version for group in batch.groups]
        out = {
            "scheduler/collect_query_count": float(len(batch.groups)),
            "scheduler/query_use_count": float(self.drawn),
            "scheduler/group_filter_count": float(self.dropped - self.cut),
            "scheduler/query_filter_count": float(self.dropped - self.cut),
            "scheduler/response_filter_count": float(sum(self.members.values())),
            "scheduler/off_policy_ratio": sum(ages) / max(1, len(ages)),
            "scheduler/off_policy_max": float(max(ages, default=0)),
            "scheduler/empty_batches": float(self.empty_tries),
            "scheduler/topped_up_count": float(self.topped_up),
            "scheduler/resample_rounds": float(max((group.round for group in batch.groups), default=0)),
        }
        if self.guard_kept or self.shrunk:
            out["scheduler/kept_by_guard"] = float(self.guard_kept)
            out["scheduler/shrunk_by_guard"] = float(self.shrunk)
        if has_gate:
            out["reward/cut_groups"] = float(self.cut)
            out["scheduler/closed_by_gate"] = float(self.closed)
        if self.judged:
            out["scheduler/acceptance_rate"] = self.kept / self.judged
        if len(self.by_domain) > 1:
            for domain, (judged, kept) in self.by_domain.items():
                if judged:
                    out[f"scheduler/acceptance_rate/{domain}"] = kept / judged
        domains = [group.task.domain for group in batch.groups]
        if len({*domains, *self.by_domain}) > 1 and domains:
            for domain in sorted({*domains, *self.by_domain}):
                out[f"batch/domain_share/{domain}"] = domains.count(domain) / len(domains)
        for name, (total, number) in (
            ("reward/launched_mean", self.reward_launched),
            ("reward/kept_mean", self.reward_kept),
            ("length/launched_mean", self.length_launched),
            ("length/kept_mean", self.length_kept),
        ):
            if number:
                out[name] = total / number
        left = self.dropped + self.kept
        for (category, reason), count in self.reasons.items():
            out[f"batch/rejected/{category}/{reason}"] = float(count)
            if left:
                out[f"batch/rejected_rate/{category}/{reason}"] = count / left
        for reason, count in self.members.items():
            out[f"batch/rejected_members/{reason}"] = float(count)
        return out

    def why(self, first_details: Mapping[tuple[str, str], str]) -> str:
        """The top reasons, in words. first_details: (domain, reason of a failure) -> the first one in words."""
        groups = sorted([(key, count) for key, count in self.reasons.items() if count], key=lambda item: -item[1])[:TOP_REASONS]
        text = "Groups dropped: " + (", ".join(f"{category}/{reason} {count}" for (category, reason), count in groups) or "none")
        members = sorted(self.members.items(), key=lambda item: -item[1])[:TOP_REASONS]
        if members:
            text += "; responses rejected: " + ", ".join(f"{reason} {count}" for reason, count in members)
        for (domain, reason), detail in first_details.items():
            if detail and (reason in self.members or any(reason == dropped for _, dropped in self.reasons)):
                text += f"; first {reason} in domain {domain!r}: {detail}"
        return text

    def advice(self, policy: str, first_details: Mapping[tuple[str, str], str]) -> str:
        """What to change, by what dropped the groups."""
        advice = []
        reasons = {reason for _, reason in self.reasons}
        uninformative = sum(count for (category, _), count in self.reasons.items() if category == "low_information")
        if uninformative > self.cut:  # a filter dropped some
            advice.append("loosen the filter that drops most, or choose easier or harder prompts")
        if self.cut:
            advice.append("let the gate cut less (gate.threshold, gate.floor), or set gate.shadow to see what it would cut")
        if "truncated" in reasons or "truncated" in self.members:
            limit = "the token limit (response_length, in an agentic run sequence_length)"
            advice.append(f"raise {limit}, or set resampling.truncated to 'keep'")
        if "group_timeout" in reasons:
            advice.append("raise resampling.group_timeout_s, or find out what hangs")
        if (reasons | self.members.keys()) & ENVIRONMENT_REASONS:
            advice.append("see why environments hang or fail, or raise environment.step_timeout_s and environment.reset_timeout_s")
        if OBSERVATION_TOO_LONG in self.members:
            advice.append("raise sequence_length, or shorten what the environment says")
        if "stale" in reasons:
            advice.append("raise resampling.max_staleness, or see why the engine does not take the new weights")
        if reasons & {"loop_error", "loop_returned_none", "response_count"}:
            advice.append("put the rollout loop right")
        others = self.members.keys() - ENVIRONMENT_REASONS - {OBSERVATION_TOO_LONG, "truncated"}
        if any(reason in others for _, reason in first_details):
            advice.append("put the verifier or the engine right")
        elif others:
            advice.append("loosen the response filter, or raise resampling.max_response_rounds")
        if policy == "raise":
            advice.append("raise the bound, or set resampling.on_exhausted to 'shrink' or 'keep_low_information'")
        return "; ".join(advice) or "look at the data and the filters"


def _add(reward: list[float], length: list[float], sums: Sums) -> None:
    reward[0] += sums.reward
    reward[1] += sums.rewards
    length[0] += sums.tokens
    length[1] += sums.rollouts
