from __future__ import annotations

from sluice.scheduler import GroupQueue


def spread(members: list[dict[str, float]]) -> bool:
    return len({member["reward"] for member in members}) > 1


def test_a_batch_is_full_when_its_groups_are_whole_and_kept():
    queue = GroupQueue(2, 2, rollout_batch_size=4, group_filter=spread)
    assert [queue.get_episode_id(group, env) for group in range(2) for env in range(2)] == [0, 0, 0, 0]
    for group in (1, 0):
        assert queue.get_batch() is None
        queue.put(group, 0, 0, {"reward": 0.0, "of": group})
        queue.put(group, 0, 0, {"reward": 1.0, "of": group})
    batch = queue.get_batch()
    assert batch == [[{"reward": 0.0, "of": group}, {"reward": 1.0, "of": group}] for group in (0, 1)]
