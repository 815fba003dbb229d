"""What the gate saves beyond the published rule: a learned rule that looks again and again, futility stops, both together; held out.

    python benchmarks/gate_beyond.py NAME=RECORDING[,RECORDING...] [NAME=...] [--seed 0] [--inputs reply is_admissible progress logprob]

Recordings are those of benchmarks/record_household.py; a NAME is a policy. Half of the groups of every policy is fitted on, every threshold
is chosen on that half, and the other half is measured, once. Groups are replayed as if their members stepped together, by the same
functions that a running gate calls; what would have been stopped or cut is known to its end, so that every decision can be judged.

- saved, tokens: share of all environment steps, of all sampled tokens, that are not run; safe: by decisions that were right
- precision: of cuts, groups whose rewards would all have been equal had nothing been stopped; of stops, trajectories that would have
  ended with the reward they had; as audited: of cuts, with the stops in force, which is what a run can see
- kept: L2 norm of the advantages of the groups that still train, as a share of all (scaled by the standard deviation)
- oracle: cuts every group with equal rewards at step 10, and no other

Intervals are of 95 %, by drawing groups again. `lower bound` thresholds are the lowest whose precision on the fitting half has a lower
bound (95 %, one-sided) of at least the floor.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.analysis.played import played_groups
from sluice.errors import ConfigError
from sluice.gate import FutilityKeeper, FutilityRule, LearnedFutility, LearnedRule, SequentialKeeper, clopper_pearson, fit_learned, signals
from sluice.gate.futility import MemberRule
from sluice.gate.learned import of_chances
from sluice.gate.learned import threshold as threshold_of
from sluice.gate.offline import auroc
from sluice.gate.played import PlayedGroup, looks, with_futility
from sluice.gate.traces import INPUTS, GroupTrace
from sluice.records import read_rollouts

K = 10  # the published step
FLOORS = (0.8, 0.9, 0.95)
SIGNAL = "prefix_edit_distance_mean"
DRAWS = 1000

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Data:
    """Recorded groups, and how they went."""

    groups: Sequence[PlayedGroup]

    @cached_property
    def lengths(self) -> Ints:
        """[N, G] environment steps."""
        return np.array([[len(member.steps) for member in group.members] for group in self.groups])

    @cached_property
    def rewards(self) -> Floats:
        """[N, G]."""
        return np.array([[member.reward for member in group.members] for group in self.groups])

    @cached_property
    def is_equal(self) -> Bools:
        """[N]."""
        return np.array([group.is_equal for group in self.groups])

    @cached_property
    def tokens(self) -> Ints:
        """[N, G, T + 1] sampled tokens of the first t steps."""
        found = np.zeros((*self.lengths.shape, int(self.lengths.max()) + 1), dtype=np.int64)
        for n, group in enumerate(self.groups):
            for m, member in enumerate(group.members):
                total = np.cumsum(member.tokens or ())
                found[n, m, 1 : len(total) + 1] = total
                found[n, m, len(total) + 1 :] = total[-1]
        return found


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What a choice of cuts and stops makes of recorded groups."""

    run: Ints  # [N, G] environment steps that are run
    cut: Bools  # [N]
    stopped: Bools  # [N, G] by the futility stop
    earned: Floats  # [N, G] rewards with these stops, had nothing been cut


def nothing(data: Data) -> Ends:
    """Everything runs to its end."""
    return cut_at(data, np.zeros(len(data.groups), dtype=np.int64))


def cut_at(data: Data, steps: Ints) -> Ends:
    """Groups are cut after so many steps; 0: not."""
    run = np.where(steps[:, None] > 0, np.minimum(data.lengths, steps[:, None]), data.lengths)
    return Ends(run=run, cut=steps > 0, stopped=np.zeros(data.lengths.shape, bool), earned=data.rewards)


def stopped_by(data: Data, rule: MemberRule) -> tuple[Ends, Data]:
    """Futile trajectories are stopped; and the groups as they are then."""
    after = Data([with_futility(group, rule) for group in data.groups])
    cut = np.zeros(len(data.groups), bool)
    return Ends(run=after.lengths, cut=cut, stopped=after.lengths < data.lengths, earned=after.rewards), after


def together(stops: Ends, steps: Ints) -> Ends:
    """Groups that are cut, beside the stops in them that came before."""
    run = np.where(steps[:, None] > 0, np.minimum(stops.run, steps[:, None]), stops.run)
    return Ends(run=run, cut=steps > 0, stopped=stops.stopped & (run == stops.run), earned=stops.earned)


# ---------------------------------------------------------------- figures

COLUMNS = (
    "steps",
    "saved",
    "safe",
    "tokens",
    "token_saved",
    "cut",
    "cut_right",
    "cut_audited",
    "stop",
    "stop_right",
    "spread",
    "kept",
    "oracle",
)


def of_groups(data: Data, ends: Ends) -> dict[str, Floats]:
    """[N] each: what every figure is a quotient of sums of."""
    lengths, rewards, equal = data.lengths, data.rewards, data.is_equal
    is_right = np.where(ends.stopped, rewards == 0, equal[:, None])
    saved = lengths - ends.run
    rows, columns = np.indices(lengths.shape)
    spread = ~equal
    still = ends.earned.max(axis=1) > ends.earned.min(axis=1)
    columns_of = {
        "steps": lengths.sum(1),
        "saved": saved.sum(1),
        "safe": (saved * is_right).sum(1),
        "tokens": data.tokens[:, :, -1].sum(1),
        "token_saved": (data.tokens[:, :, -1] - data.tokens[rows, columns, ends.run]).sum(1),
        "cut": ends.cut,
        "cut_right": ends.cut & equal,
        "cut_audited": ends.cut & ~still,
        "stop": ends.stopped.sum(1),
        "stop_right": (ends.stopped & (rewards == 0)).sum(1),
        "spread": spread,
        "kept": spread & still & ~ends.cut,
        "oracle": np.where(equal, np.maximum(lengths - K, 0).sum(1), 0),
    }
    return {name: np.asarray(columns_of[name], dtype=np.float64) for name in COLUMNS}


QUOTIENTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "saved": lambda s: s["saved"] / s["steps"],
    "safe": lambda s: s["safe"] / s["steps"],
    "tokens": lambda s: s["token_saved"] / s["tokens"],
    "precision of cuts": lambda s: s["cut_right"] / s["cut"],
    "precision of stops": lambda s: s["stop_right"] / s["stop"],
    "all decisions": lambda s: (s["cut_right"] + s["stop_right"]) / (s["cut"] + s["stop"]),
    "cuts as audited": lambda s: s["cut_audited"] / s["cut"],
    "of the oracle": lambda s: s["safe"] / s["oracle"],
    "kept": lambda s: np.sqrt(s["kept"] / s["spread"]),
}


def measure(data: Data, ends: Ends, rng: np.random.Generator) -> dict[str, tuple[float, float, float]]:
    """Every figure with its interval; NaN where it does not exist."""
    columns = of_groups(data, ends)
    n = len(data.groups)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)  # [D, N] how often each group is drawn
    whole = {name: column.sum() for name, column in columns.items()}
    draws = {name: drawn @ column for name, column in columns.items()}
    found = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for name, quotient in QUOTIENTS.items():
            values = np.asarray(quotient(draws))
            values = values[np.isfinite(values)]
            low, high = np.quantile(values, [0.025, 0.975]) if len(values) else (math.nan, math.nan)
            found[name] = (float(quotient(whole)), float(low), float(high))
    return found


# ---------------------------------------------------------------- rules


def distances(data: Data, k: int) -> tuple[Floats, Bools]:
    """[N] the published signal at K, and whether a running gate would look at the group then."""
    told = [signals([[step.action for step in member.steps] for member in group.members], k)[SIGNAL] for group in data.groups]
    has_ended = data.lengths <= k
    known = np.where(has_ended, data.rewards, np.nan)
    differs = np.array([len({*row[~np.isnan(row)].tolist()}) > 1 for row in known])
    return np.array(told), ~has_ended.all(1) & ~differs


def single_axis(fitted: Data, data: Data, k: int, floor: float, *, is_bound: bool) -> tuple[Ints, float]:
    """[N] where the single-axis gate cuts, with the threshold that saves most on the fitting half under the floor; and the threshold."""
    signal, is_open = distances(fitted, k)
    saved = np.maximum(fitted.lengths - k, 0).sum(1) * fitted.is_equal
    best, chosen = 0.0, 0.0
    for threshold in np.unique(signal[is_open]):
        cut = is_open & (signal < threshold)
        right, n = int(fitted.is_equal[cut].sum()), int(cut.sum())
        if n and (clopper_pearson(right, n, 0.9)[0] if is_bound else right / n) >= floor and saved[cut].sum() > best:
            best, chosen = saved[cut].sum(), float(threshold)
    signal, is_open = distances(data, k)
    return np.where(is_open & (signal < chosen), k, 0), chosen


def scores(rule: LearnedRule, data: Data) -> tuple[Ints, Ints, Floats]:
    """Of every look at an open group: the group, the step, the score."""
    rows, group_of, steps, members, sizes = [], [], [], [], []
    for n, group in enumerate(data.groups):
        for look in looks(group, GroupTrace(rule.horizon, rule.inputs), rule.steps):
            rows.append(look.of_group)
            members.append(look.of_members)
            sizes.append(len(look.running))
            group_of.append(n)
            steps.append(look.step)
    chances = np.split(rule.member_model.chances(np.concatenate(members)), np.cumsum(sizes)[:-1])
    whole = np.array([np.concatenate([row, of_chances(own)]) for row, own in zip(rows, chances, strict=True)])
    return np.array(group_of), np.array(steps), rule.group_model.chances(whole)


def first_at(told: tuple[Ints, Ints, Floats], least: float, n: int) -> Ints:
    """[N] the first step with a score of at least `least`; 0: never."""
    group_of, steps, found = told
    first = np.full(n, 10**9)
    hit = found >= least
    np.minimum.at(first, group_of[hit], steps[hit])
    return np.where(first < 10**9, first, 0)


def through_keepers(rule: LearnedRule, floor: float, futility: LearnedFutility | None, group: PlayedGroup) -> Ints:
    """[G] environment steps that are run, by the keepers that a run has: the same as the functions above, slower."""
    watch = SequentialKeeper(rule, group_size=len(group.members), horizon=rule.horizon, floor=floor, audit_rate=0.0)
    members = None if futility is None else FutilityKeeper(futility, audit_rate=0.0)
    watch.group_launched(0)
    run = np.zeros(len(group.members), dtype=np.int64)
    running = dict(enumerate(group.members))
    for t in range(1, rule.horizon + 1):
        for name, member in [*running.items()]:
            step = member.steps[t - 1]
            before = member.first_observation if t == 1 else member.steps[t - 2].reply
            more = {"is_admissible": step.is_admissible, "progress": step.progress, "logprob": step.logprob}
            watch.observe(0, name, t, step.action, before, reply=step.reply, **more)  # type: ignore[arg-type]
            run[name] = t
            is_over = len(member.steps) == t
            if not is_over and members is not None:
                if t == 1:
                    members.observe(0, name, 0, member.first_observation)
                is_over = members.observe(0, name, t, step.reply, action=step.action, **more)  # type: ignore[arg-type]
            if is_over:
                watch.member_ended(0, name, member.earned_by(t))
                del running[name]
        verdict = watch.decision(0)
        if not running or (verdict is not None and not verdict.keep):
            break
    return run


# ---------------------------------------------------------------- the tables


def shown(figure: tuple[float, float, float], digits: int = 1, factor: float = 100) -> str:
    """With its interval, in per cent."""
    value, low, high = (factor * one for one in figure)
    return "" if math.isnan(value) else f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


NAMES = ("saved", "safe", "of the oracle", "tokens", "precision of cuts", "cuts as audited", "precision of stops", "all decisions", "kept")


def line(name: str, data: Data, ends: Ends, rng: np.random.Generator) -> str:
    """One row of the table."""
    found = measure(data, ends, rng)
    return f"| {name} | {int(ends.cut.sum())} | {int(ends.stopped.sum())} | " + " | ".join(shown(found[one]) for one in NAMES) + " |"


HEAD = f"| % | groups cut | members stopped | {' | '.join(NAMES)} |\n|---|---|---|{'---|' * len(NAMES)}"


def fit(data: Data, inputs: Sequence[str], horizon: int, futility_floor: float | None) -> LearnedRule:
    """A rule, with what it took."""
    started = time.process_time()
    rule = fit_learned(data.groups, horizon=horizon, inputs=inputs, futility_floor=futility_floor)
    facts = {name: round(value, 4) for name, value in rule.provenance.items() if isinstance(value, int | float)}
    print(f"fitted in {time.process_time() - started:.0f} s of processor time: {facts}", file=sys.stderr, flush=True)
    return rule


def learned(name: str, rule: LearnedRule, data: Data, floors: Sequence[float], rng: np.random.Generator) -> None:
    """The learned rule alone."""
    told = scores(rule, data)
    for floor in floors:
        try:
            least = threshold_of(rule.group_calibration, floor)
        except ConfigError:
            print(f"| {name}, floor {floor}: no score clears it |" + " |" * (2 + len(NAMES)))
            continue
        print(line(f"{name}, floor {floor}", data, cut_at(data, first_at(told, least, len(data.groups))), rng), flush=True)


def everything(name: str, rule: LearnedRule, data: Data, stop_floor: float, floors: Sequence[float], rng: np.random.Generator) -> Ends:
    """The learned futility stop, and the learned rule on what is left."""
    futility = LearnedFutility(rule, floor=stop_floor)
    stops, after = stopped_by(data, futility)
    print(line(f"{name}: stops, floor {stop_floor}", data, stops, rng), flush=True)
    told = scores(rule, after)
    ends = stops
    for floor in floors:
        try:
            least = threshold_of(rule.group_calibration, floor)
        except ConfigError:
            print(f"| {name}: and cuts, floor {floor}: no score clears it |" + " |" * (2 + len(NAMES)))
            continue
        ends = together(stops, first_at(told, least, len(data.groups)))
        print(line(f"{name}: and cuts, floor {floor}", data, ends, rng), flush=True)
    return ends


def signals_alone(data: Data, rule: LearnedRule) -> None:
    """How much is known when: AUROC for groups with equal rewards."""
    told = scores(rule, data)
    print("\n| step | open groups | of them equal, % | edit distance | learned score |\n|---|---|---|---|---|")
    for step in (5, 10, 15, 20, 30):
        at = told[1] == step
        if at.any():
            signal, _ = distances(data, step)
            equal = data.is_equal[told[0][at]]
            known = [auroc(-signal[told[0][at]], equal), auroc(told[2][at], equal)]
            print(
                f"| {step} | {int(at.sum())} | {100 * equal.mean():.0f} | "
                + " | ".join("" if one is None else f"{one:.3f}" for one in known)
                + " |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, fit, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="+", metavar="NAME=RECORDING[,RECORDING...]")
    parser.add_argument("--horizon", type=int, default=40)
    parser.add_argument("--stop-floor", type=float, default=0.95)
    parser.add_argument("--inputs", nargs="*", default=list(INPUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where the rule that was fitted beside stops is written")
    asked = parser.parse_args(arguments)
    rng = np.random.default_rng(asked.seed)
    halves: dict[str, tuple[Data, Data]] = {}
    for policy in asked.policies:
        name, _, paths = policy.partition("=")
        groups = [group for path in paths.split(",") for group in played_groups(read_rollouts(path), group_size=8)]
        order = rng.permutation(len(groups))
        middle = len(groups) // 2
        halves[name] = Data([groups[i] for i in order[:middle]]), Data([groups[i] for i in order[middle:]])
        print(f"{name}: {len(groups)} groups", file=sys.stderr, flush=True)
    fitted, data = (Data([group for half in halves.values() for group in half[which].groups]) for which in (0, 1))
    share = 100 * data.is_equal.mean()
    of_steps = 100 * data.lengths[data.is_equal].sum() / data.lengths.sum()
    late = 100 * (data.lengths[data.rewards > 0] > K).mean()
    print(
        f"{len(fitted.groups)} groups to fit, {len(data.groups)} held out ({', '.join(halves)}); of these {share:.1f} % have equal "
        f"rewards, with {of_steps:.1f} % of the steps; {late:.0f} % of the successes come after step {K}\n"
    )
    print(HEAD)
    equal = data.is_equal
    print(line(f"oracle, K = {K}", data, cut_at(data, np.where(equal, K, 0)), rng))
    print(line("oracle, K = 4", data, cut_at(data, np.where(equal, 4, 0)), rng))
    for floor in FLOORS:
        for is_bound in (False, True):
            steps, threshold = single_axis(fitted, data, K, floor, is_bound=is_bound)
            how = "lower bound" if is_bound else "share"
            print(line(f"single axis, K = {K}, {how} {floor} (d < {threshold:.3f})", data, cut_at(data, steps), rng), flush=True)
    best = max(
        (of_groups(fitted, cut_at(fitted, steps))["safe"].sum(), k, steps_k)
        for k in range(4, 31, 2)
        for steps in [single_axis(fitted, fitted, k, 0.8, is_bound=False)[0]]
        for steps_k in [k]
    )
    steps, threshold = single_axis(fitted, data, best[1], 0.8, is_bound=False)
    print(line(f"single axis, best K = {best[1]}, share 0.8 (d < {threshold:.3f})", data, cut_at(data, steps), rng), flush=True)
    for n in (6, 8, 10):
        print(line(f"no new observation for {n} steps", data, stopped_by(data, FutilityRule(steps=n))[0], rng), flush=True)

    alone = fit(fitted, asked.inputs, asked.horizon, None)
    learned("learned rule", alone, data, FLOORS, rng)
    beside = fit(fitted, asked.inputs, asked.horizon, asked.stop_floor)
    ends = everything("everything", beside, data, asked.stop_floor, FLOORS, rng)
    if asked.save:
        beside.save(asked.save)

    print("\nheld-out curve of the learned rule: share of steps saved by right cuts at the highest threshold with that precision or more")
    told = scores(alone, data)
    for floor in (0.7, 0.8, 0.85, 0.9, 0.95, 0.98):
        points = []
        for least in np.quantile(told[2], np.linspace(0.3, 1, 300)):
            point = of_groups(data, cut_at(data, first_at(told, least, len(data.groups))))
            sums = {name: column.sum() for name, column in point.items()}
            if sums["cut"] and sums["cut_right"] / sums["cut"] >= floor:
                points.append((sums["safe"] / sums["steps"], sums["safe"] / sums["oracle"]))
        if points:
            print(f"precision {floor}: {100 * max(points)[0]:.1f} % of the steps, {100 * max(points)[1]:.0f} % of the oracle's")
    signals_alone(data, alone)

    print("\nby policy, everything together as fitted on all\n\n" + HEAD)
    start = 0
    for name, (_, half) in halves.items():
        part = slice(start, start + len(half.groups))
        start += len(half.groups)
        print(line(name, half, Ends(run=ends.run[part], cut=ends.cut[part], stopped=ends.stopped[part], earned=ends.earned[part]), rng))
    if len(halves) > 1:
        print("\ntransfer: fitted on one policy (its fitting half), measured on the held-out half of another\n\n" + HEAD)
        for source, (half, _) in halves.items():
            rule = fit(half, asked.inputs, asked.horizon, asked.stop_floor)
            for target, (_, other) in halves.items():
                everything(f"{source} to {target}", rule, other, asked.stop_floor, FLOORS[1:2], rng)

    checked = range(0, len(data.groups), max(1, len(data.groups) // 40))
    futility = LearnedFutility(beside, floor=asked.stop_floor)
    cleared = [floor for floor in FLOORS if floor <= beside.group_calibration.most]
    if cleared:
        floor = max(cleared)
        after = Data([with_futility(data.groups[n], futility) for n in checked])
        least = threshold_of(beside.group_calibration, floor)
        expected = together(nothing(after), first_at(scores(beside, after), least, len(after.groups)))
        started = time.process_time()
        for place, n in enumerate(checked):
            assert (through_keepers(beside, floor, futility, data.groups[n]) == expected.run[place]).all()
        cost = 1e6 * (time.process_time() - started) / expected.run.sum()
        print(f"\n{len(checked)} groups played through the keepers of a run: the same decisions; {cost:.0f} us of processor time a step")


if __name__ == "__main__":
    main()
