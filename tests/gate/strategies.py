"""Groups of actions for properties."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st


class Box:
    """Like a tensor of one number: it can be hashed, and is equal to nothing but itself."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.value)

    def __repr__(self) -> str:  # names a test, in every process alike
        return f"Box({self.value})"


NOT_BY_VALUE = [
    math.nan,
    np.float32("nan"),
    Decimal("nan"),
    complex("nan"),
    (math.nan,),
    ("go", (1, math.nan)),
    frozenset({math.nan}),
    np.datetime64("NaT"),
    Box(),
    (Box(), "go"),
]
"""What can be hashed, and is not equal to another one that says the same."""

WORDS = st.sampled_from(["look", "go north", "go south", "take", "open"])
NUMBERS = st.integers(-2, 4)
TUPLES = st.tuples(st.sampled_from("ab"), st.integers(0, 1))


@st.composite
def groups(draw, most_members: int = 6, longest: int = 8):
    """(actions, observations, k): some members end before step k, some run beyond it."""
    kind = draw(st.sampled_from([WORDS, NUMBERS, TUPLES]))
    k = draw(st.integers(1, longest))
    actions = draw(st.lists(st.lists(kind, max_size=longest + 2), min_size=2, max_size=most_members))
    # One observation before each action, and the one after the last.
    observations = [draw(st.lists(st.sampled_from("xyz"), min_size=len(member) + 1, max_size=len(member) + 1)) for member in actions]
    return actions, observations, k
