"""Doors to other trainers: their data become groups and rollouts, our verdicts become what they expect, and nothing else is decided here.

- `judging.py`: what every door shares: a filter from a configuration or as an object, and a group from the members that a framework has
- `rounds.py`: a player of the scheduler for those who generate whole batches at a time: rounds in lockstep, no clock, no torch
- `trl/`: dynamic sampling, filters, ratio guard, gate and correction inside TRL's GRPOTrainer
- `verl.py`: filter and gate on verl's `DataProto` and `AgentLoopOutput`
- `slime.py`: dynamic sampling filters for slime and miles

A door imports the package of its framework only where it is used, and only `trl/` knows torch. To add one: a file that makes `Member`s of
the framework's samples, judges `group_of(...)` with the filter it was given, and a test with the real package where that installs.
"""
