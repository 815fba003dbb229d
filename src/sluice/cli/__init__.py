"""The command line: `sluice train` and `sluice doctor`.

    app.py          the commands, their options and help
    reporting.py    errors as one line for a person, and the exit codes
    doctor.py       what `sluice doctor` asks, and how an answer looks
    environment.py  its questions about this machine
    recipe.py       its questions about one recipe
    progress.py     what is shown while a run goes on
    quiet.py        the same for --quiet

To add a command, write a function in `app.py` that imports what it needs when it runs: `sluice --help` stays fast.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `sluice` command."""
    from sluice.cli.app import app

    app()
