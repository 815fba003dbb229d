from __future__ import annotations

import asyncio

import pytest

from sluice.config.models import RewardPoolConfig
from sluice.errors import RewardError
from sluice.rewards import InlineScorer, RewardPool, build_scorer
from tests.rewards.examples import rewards, task


def test_scores_at_once_and_never_raises_for_a_bad_verifier():
    async def run() -> None:
        scorer = InlineScorer(rewards(".by_response"))
        assert (await scorer.score(task(), "0.5")).reward == 0.5
        for response, reason in [("None", "reward_missing"), ("nan", "reward_not_finite"), ("'x'", "reward_type"), ("1/0", "reward_error")]:
            failure = (await scorer.score(task(), response)).failure
            assert failure is not None
            assert failure.reason == reason
        metrics = scorer.metrics()
        assert metrics["rewards/jobs"] == 5
        assert metrics["rewards/scored"] == 1
        assert metrics["rewards/errors/reward_error"] == 1

    asyncio.run(run())


def test_a_verifier_that_exits_or_interrupts_ends_its_call_and_not_the_run():
    async def run() -> None:
        for name in (".exiting", ".interrupting"):
            scorer = InlineScorer(rewards(name))
            failure = (await scorer.score(task(), "")).failure
            assert failure is not None
            assert failure.reason == "reward_error"
            assert scorer.metrics()["rewards/errors/reward_error"] == 1

    asyncio.run(run())


def test_a_verifier_that_cannot_be_built_is_an_error_that_names_its_domain():
    with pytest.raises(RewardError, match=r"verifier of rewards\.math cannot be built: RuntimeError: no model file"):
        InlineScorer(rewards(".CannotBeBuilt"))


def test_after_close_every_call_is_answered_with_pool_closed():
    async def run() -> None:
        scorer = InlineScorer(rewards("exact"))
        await scorer.close()
        await scorer.close()
        failure = (await scorer.score(task(), "42")).failure
        assert failure is not None
        assert failure.reason == "pool_closed"

    asyncio.run(run())


def test_a_domain_without_reward_settings_is_an_error_that_names_the_known_ones():
    async def run() -> None:
        with pytest.raises(RewardError, match="belongs to the domain 'logic', `rewards` has math"):
            await InlineScorer(rewards("exact")).score(task(domain="logic"), "42")

    asyncio.run(run())


def test_the_number_of_workers_decides_which_scorer_a_run_gets():
    assert isinstance(build_scorer(rewards("exact"), RewardPoolConfig(workers=0)), InlineScorer)
    pool = build_scorer(rewards("exact"), RewardPoolConfig(workers=1))
    assert isinstance(pool, RewardPool)
    asyncio.run(pool.close())
