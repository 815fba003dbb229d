"""Settings of the whole test suite: nothing from a network, few threads, reproducible properties."""

from __future__ import annotations

import os

# Before any library reads them, and inherited by the worker processes that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# `default` explores new examples on every run; `ci` draws the same ones every time, so that a red build can be repeated.
# No deadline: the machines are slow and shared. HYPOTHESIS_PROFILE picks one by name.
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))
