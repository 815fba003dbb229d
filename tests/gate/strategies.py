"""Groups of actions for properties."""

from __future__ import annotations

from hypothesis import strategies as st

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
