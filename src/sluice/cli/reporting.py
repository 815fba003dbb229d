"""How a command ends: an error of ours as a line for a person, and an exit code for a script.

0    done
1    the run failed, or the doctor found a problem
2    the configuration, the data or the command line is wrong: nothing was started
130  stopped by Ctrl-C
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import typer

from sluice.errors import AnalysisError, ConfigError, SchedulerBug, SluiceError, TaskError

FAILED: Final = 1
WRONG_INPUT: Final = 2
STOPPED: Final = 130  # 128 + SIGINT, as shells have it

DISTRIBUTION: Final = "sluice-rl"


@contextmanager
def reported() -> Iterator[None]:
    """Turn what a user can act on into a message and an exit code. What is our fault (a bug) keeps its traceback."""
    try:
        yield
    except SchedulerBug:
        raise
    except (ConfigError, TaskError, AnalysisError) as err:
        fail(_told(err), WRONG_INPUT)
    except SluiceError as err:
        fail(_told(err), FAILED)
    except ModuleNotFoundError as err:
        package = package_of(err.name or "")
        if package is None:
            raise
        fail(f"this command needs the package {package} - pip install '{DISTRIBUTION}[train]'", FAILED)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", STOPPED)


@contextmanager
def unless_nobody_reads() -> Iterator[None]:
    """While results are printed: a reader that has seen enough and left (`sluice train ... | head -1`) is no fault."""
    try:
        yield
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # else the interpreter tries once more at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, code: int) -> None:
    """Print an error and end the command."""
    typer.echo(f"{typer.style('error:', fg=typer.colors.RED, bold=True)} {message}", err=True)
    raise typer.Exit(code)


def package_of(module: str) -> str | None:
    """The package of the `train` extra that a missing module belongs to; None: it is none of ours."""
    wanted = _spelt(module.partition(".")[0])
    return next((name for name in extra_packages("train") if _spelt(name) == wanted), None)


def extra_packages(extra: str | None) -> dict[str, str]:
    """Packages of an extra (None: those that are always needed), each with its version range as pyproject.toml states it."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    packages = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        found = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(.*?)\s*$", requirement)
        if match and (found.group(1) if found else None) == extra:
            packages[match.group(1)] = match.group(2)
    return packages


def _told(err: Exception) -> str:
    """The message and the notes that were added on its way."""
    return "\n".join([str(err), *getattr(err, "__notes__", ())])


def _spelt(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
