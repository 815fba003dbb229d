"""How many cheap responses a second the reward pool scores, how soon a killed worker is replaced, and how long `close` takes.

python benchmarks/reward_pool.py [--workers 1] [--scores 5000]
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median
from time import perf_counter, process_time

import numpy as np

from sluice.config.models import RewardConfig, VerifierConfig
from sluice.rewards import RewardPool
from sluice.types import Task

STUCK = r"(a+)+b"  # on a row of a's it backtracks for ever
RESPONSE = "the answer is 42, " * 4


async def measure(workers: int, scores: int) -> None:
    rewards = {
        "exact": RewardConfig(verifier=VerifierConfig(type="exact")),
        "stuck": RewardConfig(verifier=VerifierConfig(type="regex", args={"pattern": STUCK}), reward_timeout_s=0.05),
    }
    cheap, stuck = (
        Task(task_id="t", domain=domain, prompt="6*7=", prompt_ids=np.arange(200), answer="42", entry={"question": "6*7=", "answer": "42"})
        for domain in rewards
    )
    started = perf_counter()
    pool = RewardPool(rewards, workers)
    await pool.score(cheap, "42")
    print(f"start          {perf_counter() - started:8.3f} s until the first score")
    for _ in range(3):
        started, cpu = perf_counter(), process_time()
        await asyncio.gather(*(pool.score(cheap, RESPONSE) for _ in range(scores)))
        seconds, cpu = perf_counter() - started, process_time() - cpu
        print(f"throughput     {scores / seconds:8.0f} scores/s with {workers} worker(s), {cpu / scores * 1e6:.0f} us of this process each")
    waits = []
    for _ in range(10):
        await asyncio.gather(*(pool.score(stuck, "a" * 60) for _ in range(workers)))
        started = perf_counter()
        await pool.score(cheap, "42")
        waits.append(perf_counter() - started)
    print(f"replacement    {median(waits) * 1e3:8.1f} ms from the time-out to the next score (median of 10)")
    started = perf_counter()
    await pool.close()
    print(f"close          {(perf_counter() - started) * 1e3:8.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--scores", type=int, default=5000)
    options = parser.parse_args()
    asyncio.run(measure(options.workers, options.scores))
