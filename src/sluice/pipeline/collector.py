"""The garbage collector of a run: it looks less often, and never again at what the imports made.

A run makes a few small records for every member, nearly all of which die in order, by reference count. Python's default settings search
them for cycles every 700 allocations and, now and then, walk through every module with it: a fifth to a quarter of the shell's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (50_000, 20, 20)  # allocations per young collection; cycles are few here, so that little memory waits meanwhile


@contextmanager
def calm_garbage_collector(*, thaw: bool = True) -> Iterator[None]:
    """While inside: rare collections, and nothing that existed before is looked at. Puts everything back afterwards.

    thaw: whether what existed before is looked at again afterwards. Without, a program that plays many runs has its imports searched once.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if thaw:
            gc.unfreeze()
