"""Code as it is written for ROLL, of which only the import lines were changed; and what the tests want to know of it."""

from __future__ import annotations

from typing import ClassVar

import torch

from sluice.execution import RolloutLoop
from sluice.roll import DataProto, GroupFilter, UserDefinedRolloutLoop, remote_store


class MyGroupFilter:
    """Rejects groups with environment timeouts, failures, or no variation of rewards."""

    asked: ClassVar[list[tuple[str, int, int, int]]] = []

    def __init__(self, config, env_manager_config, mode):
        self.group_size = env_manager_config.group_size
        self.seed = config.seed
        self.mode = mode

    def filter(self, group_id, episode_id, group):
        self.asked.append((self.mode, group_id, episode_id, len(group)))
        if self.mode != "train":
            return False
        for item in group:
            if item.meta_info["env_timeout"] or item.meta_info.get("env_failed", False):
                return True
        rewards = torch.cat([item.batch["response_level_rewards"].reshape(-1) for item in group])
        return rewards.numel() > 1 and rewards.std() <= 0.01


class DropsByName(GroupFilter):
    """Derived from the default one."""

    def filter(self, group_id: int, episode_id: int, group: list[DataProto]) -> bool:
        return "odd" in group[0].non_tensor_batch["tags"][0]


class MyRolloutLoop(UserDefinedRolloutLoop):
    """Drops responses of a bad format from what the default loop makes."""

    async def _generate_and_reward_impl(self, context, req, domain):
        responses = await super()._generate_and_reward_impl(context, req, domain)
        if responses is None:
            return None
        return [item for item in responses if not item.meta_info.get("invalid_format", False)]


class RemoteFilter(GroupFilter):
    """Makes the members remote, looks at them there, and drops none of them itself."""

    most: ClassVar[int] = 0  # rows that were held at once

    def filter(self, group_id, episode_id, group):
        remote = [DataProto.to_remote(item) for item in group]
        RemoteFilter.most = max(RemoteFilter.most, len(remote_store().rows))
        rewards = torch.cat([item.batch["response_level_rewards"] for item in remote])
        return bool(rewards.min() == rewards.max())


class RemoteLoop(UserDefinedRolloutLoop):
    """Makes every response remote, and drops none of them itself."""

    async def _generate_and_reward_impl(self, context, req, domain):
        responses = await super()._generate_and_reward_impl(context, req, domain)
        return None if responses is None else [item.to_remote() for item in responses]


class SpeaksBoth(UserDefinedRolloutLoop):
    """Says two things."""

    async def run(self, context):
        return None


class Native(RolloutLoop):
    """A loop of our own."""
