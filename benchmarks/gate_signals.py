"""What the seven signals of the gate cost, against one edit-distance matrix and against plain Python, as a Markdown table.

    python benchmarks/gate_signals.py [--seed 1]

For groups of 8 at K = 10 and of 16 at K = 30, half of whose actions follow a common plan, three things are timed: all seven signals, from
texts (actions and observations) to numbers; one `rapidfuzz.process.cdist` of the same prefixes, already encoded as whole numbers (and,
faster still, as text with one character per action, which is what the signals use inside); and the mean edit distance alone by a double
loop over pairs with dynamic programming in plain Python. Each figure is the processor time of the fastest of many short rounds: other
processes only add to it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from itertools import combinations

from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from sluice.gate import GateKeeper, signals
from sluice.gate.decision import Gate

SIZES = ((8, 10), (16, 30))
ACTIONS = 20  # different ones, as in a room with some shelves and drawers


def fastest(rounds: Sequence[tuple[Callable[[], object], int]], repeats: int) -> list[float]:
    """Seconds for one call of each function, in turn: the fastest round of so many calls."""
    best = [float("inf")] * len(rounds)
    for _ in range(repeats):
        for i, (call, calls) in enumerate(rounds):
            started = time.process_time()
            for _ in range(calls):
                call()
            best[i] = min(best[i], (time.process_time() - started) / calls)
    return best


def plain_edit_distance_mean(prefixes: Sequence[Sequence[str]]) -> float:
    """The double loop that a first version would have."""
    total = pairs = 0
    for a, b in combinations(prefixes, 2):
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            before, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
        total += row[-1]
        pairs += 1
    return total / pairs / len(prefixes[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    source = random.Random(parser.parse_args().seed)
    print("| group | seven signals | cdist, numbers | cdist, text | plain loop | signals / cdist | (of text) | loop / signals |")
    print("|---|---|---|---|---|---|---|---|")
    for n, k in SIZES:
        plan = [source.randrange(ACTIONS) for _ in range(k)]
        numbers = [[step if source.random() < 0.5 else source.randrange(ACTIONS) for step in plan] for _ in range(n)]
        actions = [[f"go to drawer {number}" for number in member] for member in numbers]
        observations = [[f"The drawer {number} is closed. {source.randrange(3)}" for number in member] for member in numbers]
        texts = ["".join(chr(number + 1) for number in member) for member in numbers]

        def all_seven(actions: list[list[str]] = actions, k: int = k, observations: list[list[str]] = observations) -> object:
            return signals(actions, k, observations)

        def of_numbers(numbers: list[list[int]] = numbers) -> object:
            return cdist(numbers, numbers, scorer=Levenshtein.distance)

        def of_texts(texts: list[str] = texts) -> object:
            return cdist(texts, texts, scorer=Levenshtein.distance)

        def plain(actions: list[list[str]] = actions) -> float:
            return plain_edit_distance_mean(actions)

        assert abs(plain() - signals(actions, k)["prefix_edit_distance_mean"]) < 1e-12
        ours, matrix, text = fastest([(all_seven, 5), (of_numbers, 5), (of_texts, 5)], 2000)
        (loop,) = fastest([(plain, 1)], 20)
        print(
            f"| G {n}, K {k} | {1e6 * ours:.1f} us | {1e6 * matrix:.1f} us | {1e6 * text:.1f} us | {1e6 * loop:.0f} us "
            f"| {ours / matrix:.1f} | {ours / text:.1f} | {loop / ours:.0f} |"
        )
    print(f"\nOne environment step told to the keeper, decision asked for: {1e6 * seconds_per_step():.2f} us")


def seconds_per_step(groups: int = 60, n: int = 8, k: int = 10) -> float:
    """The keeper's share of one environment step: told of it, and asked whether the group is cut, up to K."""
    keeper = GateKeeper(Gate(k=k, threshold=0.0), group_size=n, audit_rate=0.0)
    best = float("inf")
    for group in range(groups):
        keeper.group_launched(group)
        started = time.process_time()
        for step in range(1, k):
            for member in range(n):
                keeper.observe(group, member, step, "look", "a room")
                keeper.decision(group)
        best = min(best, (time.process_time() - started) / (n * (k - 1)))
        keeper.group_ended(group)
    return best


if __name__ == "__main__":
    main()
