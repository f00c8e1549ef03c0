"""docs/cache.md states the numbers that `layout.py` computes for the released shape."""

from pathlib import Path

import pytest

from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.numerics.formats import get_format

ROOT = Path(__file__).resolve().parents[2]
EVERY = tuple(range(2, 40))
PAGE = (ROOT / "docs" / "cache.md").read_text()


@pytest.fixture(scope="module")
def released():
    return ModelConfig.from_json(ROOT / "configs" / "v41_flash.json")


def rows_of(table_key: str) -> list[list[str]]:
    """Cells of the table rows that start with a word."""
    lines = [line for line in PAGE.splitlines() if line.startswith(f"| {table_key}")]
    return [[cell.strip().strip("*`") for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> int:
    """The last number of a cell: `64 x 288 = 18,432` -> 18432."""
    return int(cell.replace("*", "").removesuffix(" B").split("= ")[-1].replace(",", ""))


def test_page_table_is_the_layout(released):
    layout = cache_layout(released)
    stated = [
        (int(owner.split()[1]), kind, number(offset), number(size))
        for owner, _, _, main_at, main_size, index_at, index_size in rows_of("layer ")
        for kind, offset, size in (("main", main_at, main_size), ("index", index_at, index_size))
    ]
    assert stated == [(m.layer, m.kind, m.offset, m.nbytes) for m in layout.members]


def test_sums_are_the_layouts(released):
    layout = cache_layout(released)
    per_token, rest = divmod(layout.page_bytes, layout.page_tokens)
    assert rest == 0
    window = layout.ring[0]
    for value in (
        layout.page_bytes, per_token, per_token * 2**20, layout.ring_rows, window.row_bytes, window.nbytes,
        20 * window.nbytes, layout.ring_bytes - layout.draft_ring_bytes, layout.draft_ring_bytes, layout.state_bytes,
    ):  # fmt: skip
        assert f"{value:,}" in PAGE


@pytest.mark.parametrize("name", ["fp4_e4m3", "mxfp4", "mxfp8", "fp8_fp32", "bf16", "fp32"])
def test_row_table_is_the_formats(name):
    (cells,) = rows_of(f"`{name}`")
    assert [number(cell) for cell in cells[3:5]] == [get_format(name).row_bytes(width) for width in (512, 128)]


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("released", {}),
        ("entries and index keys `bf16`", {"main_format": "bf16", "index_format": "bf16"}),
        ("entries `mxfp8`, index keys as", {"main_format": "mxfp8"}),
        ("entries `mxfp8`, index keys `fp8_fp32`", {"main_format": "mxfp8", "index_format": "fp8_fp32"}),
        ("every global layer owns", {"kv_source_layer_ids": EVERY, "index_source_layer_ids": EVERY}),
        ("encoder m = 1", {"compress_ratios": (1, 1)}),
        ("encoder m = 4 |", {"compress_ratios": (4, 1)}),
        ("decoder m = 2", {"compress_ratios": (2, 2)}),
        ("encoder m = 4, decoder", {"compress_ratios": (4, 2)}),
    ],
)
def test_alternatives_are_the_layouts(released, row, changes):
    if "compress_ratios" in changes:
        encoder, decoder = changes["compress_ratios"]
        changes = {"compress_ratios": (0, 0, *[encoder] * 18, *[decoder] * 20, 0, 0, 0)}
    layout = cache_layout(released.replace(candidate_source_layer_id=-1, **changes))  # a pool stores nothing
    (cells,) = rows_of(row)
    assert number(cells[1]) * layout.page_tokens == layout.page_bytes
