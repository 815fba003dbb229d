"""A rollout loop written for ROLL: only its import line was changed, from roll.distributed.scheduler to sluice.roll."""

from sluice.roll import UserDefinedRolloutLoop


class DropInvalidFormat(UserDefinedRolloutLoop):
    """Takes responses of a bad format out of what the default loop makes."""

    async def _generate_and_reward_impl(self, context, req, domain):
        responses = await super()._generate_and_reward_impl(context, req, domain)
        if responses is None:
            return None
        return [item for item in responses if not item.meta_info.get("invalid_format", False)]


def score(task, response):
    """The verifier, which notes in ROLL's way what else it found: a named score comes back in `item.meta_info`."""
    is_a_number = response.strip().lstrip("-").isdigit()
    return {"reward": float(response.strip() == task.answer), "invalid_format": float(not is_a_number)}
