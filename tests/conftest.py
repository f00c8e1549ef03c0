"""Settings of the whole suite: reproducible property tests, no time limits that a busy machine would break."""

import os

import hypothesis

# Derandomised: a run in CI and a run at home try the same examples. No deadline: the first example compiles.
hypothesis.settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("project")


def pytest_xdist_auto_num_workers() -> int:
    """Processes of a run: one per core that this process may use, at most 8, as each holds about 2 GiB."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)
