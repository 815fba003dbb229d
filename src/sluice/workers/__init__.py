"""Workers: processes that do one job after another, and of which a stuck or dead one is killed and replaced.

forkserver.py  the small process from which workers are forked, and which ends them
connection.py  the pool's end of one worker
pool.py        what every pool of workers does: start, lose, replace and end them
serving.py     what runs in a worker: one job after another, until the other end hangs up

The room knows neither verifiers nor environments. A new kind of pool is a subclass of `ProcessPool` that says how a job is handed out,
answered and lost, and two functions for the worker's side, named by import path: one imports, one builds and calls `serve_jobs`.
"""

from __future__ import annotations

from sluice.workers.connection import Worker
from sluice.workers.pool import CANCEL_GRACE_S, START_TRIES, PoolKind, ProcessPool
from sluice.workers.serving import pack_job, serve_jobs, tell_failed

__all__ = ["CANCEL_GRACE_S", "START_TRIES", "PoolKind", "ProcessPool", "Worker", "pack_job", "serve_jobs", "tell_failed"]
