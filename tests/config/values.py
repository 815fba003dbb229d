"""Values that a configuration may or may not take, for properties."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TRICKY = st.sampled_from(
    ["on", "off", "yes", "no", "1e-3", "010", "0x1f", "null", "~", "", "1:30", "2024-01-01", "<<", "a: b", "#", "é", " x", "-", "=", "!t"]
)
TEXTS = TRICKY | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6)

WRONG_VALUES = [None, True, -1, 0, 1.5, 1e400, "", "x", [], ["x"], {}, {"x": 1}, float("nan"), "3", [[]], [{}], {"type": 3}, {1: 2}]
WRONG = st.sampled_from(WRONG_VALUES)
FOREIGN = ("Input should", "pydantic", "another value", "a value", "constrained", "literal[", "[key]")  # words of others


def paths_of(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*above, key), *paths_of(inner, (*above, key))]]
