"""The room that builds a run from a configuration and sees it through to its end.

    rlvr.py         `train` and `dry_run` of an RLVR recipe: tasks, engine, verifiers, machine, trainer and records put together
    feed.py         the trainer's side of the shell: batches in, finished steps out
    loop_thread.py  one asyncio loop in a thread of its own, called from the main thread
    collector.py    the garbage collector's settings during a run
    log_to_run.py   warnings told by logging reach display and run.db
    interrupt.py    Ctrl-C: the first stops in bounded time with everything saved, the second at once

The trainer runs in the main thread; the machine, the engine's futures and the verifiers live on the loop.
"""
