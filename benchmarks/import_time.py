"""Seconds of `import sluice` in a fresh interpreter, beside those of an empty one.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 7


def seconds(code: str) -> float:
    """Median wall-clock seconds of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    empty, ours, numpy = seconds("pass"), seconds("import sluice"), seconds("import numpy")
    print(f"empty interpreter {empty:.3f} s, import sluice {ours:.3f} s (adds {ours - empty:.3f} s), import numpy {numpy:.3f} s")


if __name__ == "__main__":
    main()
