"""The public names of the room, and that naming them costs nothing."""

from __future__ import annotations

import pytest

import sluice.roll
from sluice.config import RlvrConfig
from tests.test_import import HEAVY, modules_after


def test_the_room_loads_no_torch_before_a_name_is_used() -> None:
    assert not modules_after("import sluice.roll") & {*HEAVY, "numpy"}


def test_every_public_name_is_there_and_others_are_not() -> None:
    assert all(getattr(sluice.roll, name) is not None for name in sluice.roll.__all__)
    assert set(sluice.roll.__all__) <= set(dir(sluice.roll))
    assert sluice.roll.RLVRConfig is RlvrConfig
    with pytest.raises(AttributeError, match=r"module 'sluice\.roll' has no attribute 'DataProtos'"):
        _ = sluice.roll.DataProtos
