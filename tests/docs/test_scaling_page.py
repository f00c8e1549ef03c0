"""docs/scaling.md: its sizes are those that the package computes."""

import pathlib

import pytest

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.shipped import config_path
from dsflash_jax.weights.shapes import parameter_counts

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
CFG = ModelConfig.from_json(config_path("v41_flash"))


@pytest.mark.slow
def test_sizes_of_the_released_shape():
    counts = parameter_counts(CFG)
    parts = {row["part"]: row["parameters"] for row in counts["parts"]}
    experts = parts["routed experts"]
    rest = counts["backbone"] + counts["hyper_connections"] - experts
    tables = counts["engram_tables"]
    layout = cache_layout(CFG)
    for number in (experts, rest, counts["drafts"], tables):
        assert f"{number:,} parameters" in PAGE
    packed = experts / 2 + experts / 32
    assert f"{packed / 1e9:.2f} GB | {packed / 8e9:.2f} GB" in PAGE
    assert f"at most {2 * rest / 1e9:.2f} GB" in PAGE and f"at most {2 * counts['drafts'] / 1e9:.2f} GB" in PAGE
    assert f"{(tables + tables / 32) / 1e9:.2f} GB" in PAGE
    pages = layout.pages_for(1 << 20) * layout.page_bytes
    assert f"{pages / 1e6:.2f} MB" in PAGE
    assert f"{(layout.ring_bytes + layout.state_bytes) / 1e6:.2f} MB" in PAGE
