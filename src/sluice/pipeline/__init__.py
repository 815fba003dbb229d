"""The room that builds a run from a configuration and sees it through to its end.

    train.py        `train`, `resume` and `dry_run` of a recipe
    job.py          what a kind of run must offer
    rlvr.py         prompts, verifiers, query and response filters
    agentic.py      environments, trajectories, group filters
    gate.py         its gate
    build.py        from a configuration to its job
    run.py          one run under way
    resume.py       where a run is taken up again
    display.py      what a run shows while it goes on
    dry_run.py      one group of each domain, sampled, scored and judged
    dry_run_agentic.py   one group of one episode, played and judged
    feed.py         the trainer's side of the shell: batches in, finished steps out
    loop_thread.py  one asyncio loop in a thread of its own, called from the main thread
    collector.py    the garbage collector's settings during a run
    log_to_run.py   warnings told by logging reach display and run.db
    interrupt.py    Ctrl-C: the first stops in bounded time with everything saved, the second at once

The trainer runs in the main thread; the machine, the engine's futures and the verifiers live on the loop.
"""
