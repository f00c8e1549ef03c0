"""The scratch budget changes no selection, and every KV format keeps prefill equal to decode."""

import pytest

from dsflash_jax.numerics.formats import FORMAT_NAMES
from tests.model import running
from tests.model.comparing import Tally, assert_same_run
from tests.model.running import run_chunks

LENGTH = 40
# In row k cache c uses format k + c: six rows give every cache every format.
ROWS = [tuple(FORMAT_NAMES[(k + c) % len(FORMAT_NAMES)] for c in range(3)) for k in range(len(FORMAT_NAMES))]


@pytest.mark.parametrize("scratch", [1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (20_000, 100_000))])
def test_tile_size_never_changes_a_selection(scratch):
    """B42: scores and gathers are tiled under the budget; 1 KB forces single rows and single pages."""
    cfg, small = (running.shallow(window_format="fp32", **more) for more in ({}, {"scratch_bytes": scratch}))
    params, tokens = running.parameters(cfg), running.prompt(LENGTH, 0)
    whole, parts = (run_chunks(c, params, tokens, [16, 13, 11], row_bucket=16) for c in (cfg, small))
    assert_same_run((cfg, params), (whole.runs[0], whole.stored(0)), (parts.runs[0], parts.stored(0)))


def check_formats(formats):
    cfg = running.single(**dict(zip(("window_format", "main_format", "index_format"), formats, strict=True)))
    params, tokens, tally = running.parameters(cfg), running.prompt(17, 1), Tally()
    whole = run_chunks(cfg, params, tokens, [16, 1], row_bucket=16)
    parts = run_chunks(cfg, params, tokens, [5] + [1] * 12, row_bucket=16)
    assert_same_run((cfg, params), (whole.runs[0], whole.stored(0)), (parts.runs[0], parts.stored(0)), tally)
    tally.check()


@pytest.mark.parametrize(
    "formats",
    [*ROWS[::2], *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS[1::2])],
    ids="-".join,
)
def test_any_cache_may_use_any_format(formats):
    check_formats(formats)
