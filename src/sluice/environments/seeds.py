"""Which problem an episode plays: a seed made of the run's seed, the environment group and the episode, and of nothing else.

All members of an episode get the same one, so that they see the same problem; a run that is repeated or resumed gets the same problems
again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

SEED_BITS: Final = 63  # a signed 64-bit number wherever it is stored


def episode_seed(run_seed: int, group_id: int, episode_id: int) -> int:
    """The seed of an episode, in 0 .. 2**63 - 1. Neighbouring ids give unrelated seeds."""
    digest = blake2b(f"{run_seed}/{group_id}/{episode_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
