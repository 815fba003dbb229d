"""The room is light: engines and libraries of others are imported where they are used."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "ray", "transformers", "textworld", "alfworld", "fast_downward", "gymnasium"}


def test_the_room_and_the_twin_load_nothing_heavy() -> None:
    code = (
        "import sluice.environments as e, sys\n"
        "environment = e.build_environment({'type': 'household'})\n"
        "environment.reset(1), environment.step('look')\n"
        "e.build_environment({'type': 'frozen_lake'}).reset(1)\n"
        "print(*sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not set(shown.stdout.split()) & HEAVY
