"""Custom filters that the tests name by import path."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from sluice.types import Group, Rollout, Verdict

HERE = "tests.filters.filters_for_tests"
NOT_CALLABLE = 3


def keep_all(group):
    return True


def drop_all(group):
    return False


def best_above(group: Group, limit: float = 0.5) -> bool:
    return max(group.rewards) > limit


def numpy_bool(group):
    return np.bool_(True)


def zero_dim_array(group):
    return np.array(False)


def zero_dim_tensor(group):
    import torch

    return torch.tensor(True)


def one_element_array(group):
    return np.array([True])


def integer(group):
    return 1


def nothing(group):
    return None


def score(group):
    return np.array(0.7)


def verdict(group):
    return Verdict.dropped("too_boring", "low_information", evidence={"yawns": 3.0})


def raises(group):
    raise KeyError("oops")


def exits(group):
    sys.exit(3)


def interrupts(group):
    raise KeyboardInterrupt


class Unreadable:
    shape = ()

    def item(self):
        sys.exit(4)


def unreadable(group):
    return Unreadable()


class ExitsWhenBuilt:
    def __init__(self) -> None:
        sys.exit(5)

    def judge(self, group):
        return True


def takes_nothing():
    return True


async def coroutine(group):
    return True


def mentions(rollout: Rollout, word: str) -> bool:
    return word in rollout.turns[-1].text


class Counting:
    """A class with `.judge`, built once."""

    def __init__(self, start: int = 0) -> None:
        self.calls = start

    def judge(self, group: Group) -> bool:
        self.calls += 1
        return self.calls > 2


class Surprising:
    """Keeps a group whose best reward was not seen before, and remembers across checkpoints what was."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.seen: list[float] = []

    def judge(self, group) -> bool:
        best = float(max(group.rewards)) if isinstance(group, Group) else float(group.reward)
        is_new = best not in self.seen
        self.seen = [*self.seen, best][-self.most :]
        return is_new

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


class GivesItselfAway:
    """Saves the very objects that it goes on with, of types that know more than they need."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: tuple[list[float], ...] = ()
        self.sums = np.zeros(1)

    def judge(self, group) -> bool:
        self.counts[str(max(group.rewards))] += 1
        self.last = (list(group.rewards),)
        self.sums += sum(group.rewards)
        return True

    def state_dict(self):
        return {"counts": self.counts, "last": self.last, "sums": self.sums}

    def load_state_dict(self, state): ...


class OnlySaves:
    def judge(self, group):
        return True

    def state_dict(self):
        return {}


class SavesWithArguments(OnlySaves):
    def state_dict(self, folder):
        return {}

    def load_state_dict(self, state):
        pass


class LoadsNothing(OnlySaves):
    def load_state_dict(self):
        pass


class ExitsOnSave(OnlySaves):
    def state_dict(self):
        sys.exit(6)

    def load_state_dict(self, state):
        pass


def says(group, verdict):
    return verdict


def strange_category(group):
    return Verdict.dropped("odd", "boring")


class SpeaksRoll:
    def filter(self, group_id, episode_id, group):
        return False


class SpeaksBoth(SpeaksRoll):
    def judge(self, group):
        return True


class SpeaksNeither:
    pass


class BreaksWhenBuilt:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def judge(self, group):
        return True


# ---------------------------------------------------------------- classes of group_filter_cls


class Told:
    """Base: remembers how it was built and keeps everything."""

    told: tuple = ()

    def judge(self, group):
        return True


class ThreeByName(Told):
    def __init__(self, mode, env_manager_config, config) -> None:
        self.told = (config, env_manager_config, mode)


class ThreeByPosition(Told):
    def __init__(self, cfg, env_cfg, mode) -> None:
        self.told = (cfg, env_cfg, mode)


class ThreeOfAnyName(Told):
    def __init__(self, a, b, c="nobody") -> None:
        self.told = (a, b, c)


class AnyArguments(Told):
    def __init__(self, *arguments) -> None:
        self.told = arguments


class AnyKeywords(Told):
    def __init__(self, **arguments) -> None:
        self.told = (arguments["config"], arguments["env_manager_config"], arguments["mode"])


class OnlyMode(Told):
    def __init__(self, mode) -> None:
        self.told = (mode,)


class OwnSettings(Told):
    def __init__(self, limit=0.5, window=3, name="own") -> None:
        self.told = (limit, window, name)


class OwnSettingsAndMode(Told):
    def __init__(self, limit=0.5, window=3, mode="nobody") -> None:
        self.told = (limit, window, mode)


class WrongOrder(Told):
    def __init__(self, mode, cfg, env_cfg) -> None: ...


class FourArguments(Told):
    def __init__(self, config, env_manager_config, mode, folder) -> None: ...


class JudgesNothing:
    def judge(self):
        return True


class JudgesLater:
    async def judge(self, group):
        return True


class Grumbles:
    """Answers with a number."""

    def judge(self, group):
        return 0.5


class NamesTimeouts:
    """A native filter as a user writes it: other rules in training than in evaluation."""

    def __init__(self, config, env_manager_config, mode) -> None:
        self.mode = mode

    def judge(self, group):
        return self.mode != "train" or not any("env_timeout" in rollout.flags for rollout in group.rollouts)


class SpeaksRollInFull:
    """As users of ROLL write it, with a memory."""

    def __init__(self, config, env_manager_config, mode) -> None:
        self.mode = mode
        self.seen = 0

    def filter(self, group_id, episode_id, group):
        self.seen += 1
        return self.mode == "train" and len(group) < 2


def only_in_training(group, mode):
    return mode == "val"


class WithMode:
    def __init__(self, least: float = 0.0, mode: str = "nobody") -> None:
        self.least, self.mode = least, mode

    def judge(self, group):
        return self.mode == "val" or max(group.rewards) >= self.least
