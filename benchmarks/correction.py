"""What the train-infer correction costs in time and memory, against plain passes over the same arrays.

    python benchmarks/correction.py [--threads 1] [--rounds 40]

A batch of 256 rows of 4096 float32 log-probs, 64 segments a row, with filters on ratio and difference at all four levels and a token
weight. A plain pass is `((a - b).exp() * m).sum()` over the same three arrays. Both are timed in turn; each figure is the time of the
fastest round, since other processes only add to it, and the ratio of the medians stands beside it. Extra memory is the most that torch
had allocated at once during a call, results included, plus the most that numpy had, in arrays of the size of the log-probs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile

from sluice.correction import compute_train_infer_correction

ROWS, TOKENS, SEGMENTS = 256, 4096, 64
LEVELS = ("token", "segment", "geometric", "sequence")
SETTINGS = {
    "filters": [{"enabled": True, "agg_type": level, "ratio_low": 0.7, "ratio_high": 1.4, "diff_enabled": True} for level in LEVELS],
    "is_weight": {"enabled": True},
}


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask, old and inference log-probs: three quarters of each 64th part of a row are the policy's."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(ROWS, TOKENS, generator=generator)
    inference = old + 0.1 * torch.randn(ROWS, TOKENS, generator=generator)
    part = TOKENS // SEGMENTS
    mask = (torch.arange(TOKENS) % part < part * 3 // 4).expand(ROWS, TOKENS).contiguous()
    return mask, old, inference


def in_turn(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of every round of each call."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
    return seconds


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that one call had allocated at once, its results included."""
    call()
    with profile(profile_memory=True) as recorded:
        result = call()
    del result
    held = peak = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    tracemalloc.start()
    call()
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak + numpy_peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    mask, old, inference = batch(given.seed)
    array = old.nbytes
    print(f"{ROWS} x {TOKENS} float32, {SEGMENTS} segments a row, {given.threads} torch threads, arrays of {array / 2**20:.0f} MiB\n")
    print("| mask | plain pass | correction | ratio of the fastest | of the medians | peak extra memory |")
    print("|---|---|---|---|---|---|")
    for name, m in (("bool", mask), ("int64", mask.long()), ("float32", mask.float())):

        def plain(m: torch.Tensor = m) -> object:
            return ((old - inference).exp() * m).sum()

        def correction(m: torch.Tensor = m) -> object:
            is_weight, filter_mask, metrics = compute_train_infer_correction(SETTINGS, m, old, inference)
            return is_weight, filter_mask, dict(metrics)

        passes, calls = in_turn([plain, correction], given.rounds)
        fastest, middle = min(calls) / min(passes), statistics.median(calls) / statistics.median(passes)
        print(
            f"| {name} | {1e3 * min(passes):.2f} ms | {1e3 * min(calls):.2f} ms | {fastest:.1f} | {middle:.1f} "
            f"| {peak_bytes(correction) / array:.1f} arrays |"
        )


if __name__ == "__main__":
    main()
