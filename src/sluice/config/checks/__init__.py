"""What no single key can tell: settings that exclude each other, and settings that would do nothing.

    finding.py  one broken rule, and how its messages are made
    run.py      rules of every run: how batches are filled, how old groups may be, the guard, the trainer, the distance to the engine
    correction.py  rules of the train-infer correction
    rlvr.py     rules of an RLVR run: sources, domains, prompts, the mix
    agentic.py  rules of an agentic run: environments, the dialogue, groups of trajectories
    gate.py     rules of its gate

Two lists of rules. `contradictions` are wrong whatever the user wrote. `without_effect` names every key that the rest of the
configuration makes idle; it is an error only where the user wrote it, and the resolved configuration leaves it out. A rule reads the
configuration and nothing else: whether a folder exists, or a filter or an environment takes its arguments, is for the room that uses it.

Not refused on purpose: intervals longer than the run (`validation.every_steps` above `trainer.max_steps` and the like), so that a
recipe can be tried with `trainer.max_steps=1`.

To add a rule, yield one `Finding`: the key to change, the keys it was weighed against, and what to do. A rule about keys that every run
has goes to run.py, even where the names of the keys beside them differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.agentic import AgenticConfig
from sluice.config.checks import agentic, rlvr
from sluice.config.checks.finding import Finding, is_written, template_fields
from sluice.config.pipelines import AnyConfig

__all__ = ["Finding", "contradictions", "is_written", "template_fields", "without_effect"]


def contradictions(config: AnyConfig) -> Iterator[Finding]:
    """Settings that cannot all hold."""
    return agentic.contradictions(config) if isinstance(config, AgenticConfig) else rlvr.contradictions(config)


def without_effect(config: AnyConfig) -> Iterator[Finding]:
    """Every key that does nothing because of another key, whether or not the user wrote it."""
    return agentic.without_effect(config) if isinstance(config, AgenticConfig) else rlvr.without_effect(config)
