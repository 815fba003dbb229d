"""Which kinds of runs there are: the key `pipeline` of a recipe chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from sluice.config.agentic import AgenticConfig
from sluice.config.models import RlvrConfig
from sluice.config.problems import Problem, suggestion, told

AnyConfig: TypeAlias = RlvrConfig | AgenticConfig
"""A whole run of any kind."""

PIPELINES: Final[Mapping[str, type[RlvrConfig] | type[AgenticConfig]]] = {"rlvr": RlvrConfig, "agentic": AgenticConfig}
"""`pipeline` in a recipe -> what the recipe holds. The first one is meant where the key is missing."""

DEFAULT: Final = next(iter(PIPELINES))


def choose(data: Mapping[str, Any]) -> tuple[str, list[Problem]]:
    """The pipeline of a recipe; of one that names none there is, what is wrong, and that to which most of its keys belong."""
    name = data.get("pipeline", DEFAULT)
    if isinstance(name, str) and name in PIPELINES:
        return name, []
    expected = f"expected one of {', '.join(PIPELINES)}, got {told(name)}"
    near = suggestion(name, PIPELINES, what="valid values") if isinstance(name, str) else ""
    likely = max(PIPELINES, key=lambda pipeline: len(PIPELINES[pipeline].model_fields.keys() & data.keys()))
    return likely, [Problem(path=("pipeline",), message=expected + near)]
