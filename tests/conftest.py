"""Settings of the whole suite: reproducible property tests, no time limits that a busy machine would break."""

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
