"""The command line: `sluice train`, `sluice status`, `sluice doctor`, `sluice gate` and `sluice correction`.

    app.py          the commands, their options and help
    reporting.py    errors as one line for a person, and the exit codes
    status.py       what `sluice status` prints
    doctor.py       what `sluice doctor` asks, and how an answer looks
    environment.py  its questions about this machine
    recipe.py       its questions about one recipe
    gate.py         `sluice gate sweep` and `sluice gate fit`
    gate_tables.py  what they print
    correction.py   `sluice correction report`; correction_page.py: its plots
    progress.py     what is shown while a run goes on
    quiet.py        the same for --quiet

To add a command, write a function in `app.py` that imports what it needs when it runs: `sluice --help` stays fast.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `sluice` command."""
    # Engine and trainer have a pool of torch threads each, and take turns: threads that spin while they wait would take the cores from the
    # other pool. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _look_in_the_current_folder()

    from sluice.cli.app import app

    app()


def _look_in_the_current_folder() -> None:
    """Find the user's own filters and verifiers beside the recipe, as `python -m` does; worker processes get this `sys.path` as well."""
    if sys.flags.safe_path:  # python -P, PYTHONSAFEPATH: the user wants no such thing
        return
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return
    if sys.path[:1] not in ([""], [here]):
        sys.path.insert(0, here)
