"""A group filter written for ROLL: only its import line was changed, from roll.pipeline.agentic.agentic_pipeline to sluice.roll."""

import torch

from sluice.roll import GroupFilter


class NoTimeoutsAndSomeSpread(GroupFilter):
    """Drops groups with environment faults, and groups in which all trajectories earn the same."""

    def filter(self, group_id, episode_id, group):
        if self.mode != "train":
            return False
        if any(item.meta_info["env_timeout"] or item.meta_info["env_failed"] for item in group):
            return True
        rewards = torch.cat([item.batch["response_level_rewards"].reshape(-1) for item in group])
        return rewards.numel() > 1 and rewards.std() <= 0.01
