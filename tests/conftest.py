"""Settings of the whole suite: reproducible property tests, and the limits of time and memory that it must keep."""

import gc
import os
from pathlib import Path

import hypothesis
import jax

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

# A test run is mostly compiling, often the same program in several processes and runs. Bounded, as only then JAX locks
# the folder against a reader of a half-written program.
CACHE_BYTES = 2**30
SLOW_COMPILE_SECONDS = 0.3


def pytest_configure(config) -> None:
    """Keeps compiled programs in pytest's own cache folder (`pytest --cache-clear` empties it)."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SLOW_COMPILE_SECONDS)


def pytest_xdist_auto_num_workers() -> int:
    """Processes of a run: one per core that this process may use, at most 8, as each holds about 2 GiB."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


# Linux gives a process 65,530 memory mappings (vm.max_map_count). XLA takes some for every program it compiles for CPU
# and JAX keeps the programs, so a whole run would pass the limit, where LLVM aborts the process.
MOST_MAPPINGS = 24_000


def mappings() -> int:
    """Memory mappings of this process; 0 where the system does not tell."""
    listing = Path("/proc/self/maps")
    return listing.read_bytes().count(b"\n") if listing.exists() else 0


def pytest_runtest_logreport(report) -> None:
    """Lets go of compiled programs when there are many. Only after a long call: counting takes some milliseconds."""
    if report.when == "call" and report.duration > 1 and mappings() > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
