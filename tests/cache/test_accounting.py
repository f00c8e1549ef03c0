"""The report on cache sizes: published sums, and the same numbers from real arrays."""

import json
from pathlib import Path

import jax
import pytest

from dsflash_jax import cli
from dsflash_jax.cache.accounting import bytes_per_token, human_size, kv_report, sequence_bytes
from dsflash_jax.cache.layout import cache_layout, pages_for
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RELEASED = ModelConfig.from_json(CONFIGS / "v41_flash.json")
TINY = ModelConfig.from_json(CONFIGS / "tiny.json")
LAB = ModelConfig.from_json(CONFIGS / "lab.json")
WINDOW_ONLY = TINY.replace(
    compress_ratios=(0,) * 6, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1
)
BF16 = {"main": "bf16", "index": "bf16", "window": "bf16"}


def alternatives(cfg, formats=None):
    """change -> bytes per token"""
    return {row["change"]: row["bytes_per_token"] for row in kv_report(cfg, 1024, formats)["alternatives"]}


def test_released_shape():
    report = kv_report(RELEASED, 2**20)
    assert report["bytes_per_token"] == 890
    assert report["page_bytes"] == 113_920
    assert report["pages"] == 8_192
    assert report["sequence_bytes"] == 933_232_640 + report["fixed_bytes"]
    starts = [row["page_offset"] for row in report["bytes_per_token_by_layer"] if row["cache"] == "main"]
    assert starts == [0, 22_784, 45_568, 68_352]
    window = report["fixed_bytes_per_sequence"][0]
    assert (window["side"], window["layers"], window["rows"]) == ("encoder", 20, 134)
    assert (window["row_bytes"], window["bytes"]) == (528, 1_415_040)
    draft = report["fixed_bytes_per_sequence"][2]
    assert (draft["side"], draft["layers"], draft["bytes"]) == ("draft", 3, 212_256)


def test_released_shape_by_cache_and_side():
    rows = {row["cache"]: row for row in kv_report(RELEASED, 1)["bytes_per_token_by_cache"]}
    assert [rows[cache]["bytes_per_token"] for cache in ("main", "index", "sum")] == [720, 170, 890]
    assert (rows["sum"]["encoder"], rows["sum"]["decoder"]) == (534, 356)


def test_released_alternatives_are_the_published_ones():
    assert alternatives(RELEASED) == {
        "this configuration": 890,
        "main bf16, index bf16": 3_200,
        "main mxfp8, index mxfp4": 1_490,
        "main mxfp8, index fp8_fp32": 1_650,
        "main as a V4 record of 584 B, index mxfp4": 1_630,
        "no sharing: all 38 global layers own KV": 10_324,
        "encoder m = 1": 1_424,
        "encoder m = 4": 623,
        "decoder m = 2": 712,
        "encoder m = 4, decoder m = 2": 445,
    }


def test_an_alternative_that_is_the_configuration_itself_is_not_listed():
    assert "main bf16, index bf16" not in alternatives(RELEASED, {"main": "bf16", "index": "bf16"})
    assert "decoder m = 2" not in alternatives(RELEASED.replace(compress_ratios=(0, 0, *[2] * 38)))
    only_decoder = LAB.replace(compress_ratios=(0, 1, 1, 1), kv_source_layer_ids=(1,), index_source_layer_ids=(1, 2))
    changes = list(alternatives(only_decoder))
    assert "decoder m = 2" in changes and not any("encoder" in change for change in changes)


def test_an_alternative_that_does_not_fit_says_why():
    narrow = TINY.replace(head_dim=16, window_format="bf16")
    row = next(r for r in kv_report(narrow, 8)["alternatives"] if r["change"] == "main mxfp8, index mxfp4")
    assert row["bytes_per_token"] is None and "head_dim=16" in row["note"]


@pytest.mark.parametrize("cfg", [RELEASED, TINY, LAB], ids=["released", "tiny", "lab"])
def test_two_lengths_give_back_both_terms_and_the_quotient_does_not(cfg):
    layout, page = cache_layout(cfg), cfg.page_size
    short, long = (sequence_bytes(layout, pages * page) for pages in (3, 11))
    slope = (long - short) / (8 * page)
    assert slope == bytes_per_token(layout)
    assert short - slope * 3 * page == kv_report(cfg, 1)["fixed_bytes"]
    assert short / (3 * page) > long / (11 * page) > slope


def test_a_page_is_paid_as_a_whole():
    layout = cache_layout(TINY)
    assert [pages_for(TINY, n) for n in (1, 7, 8, 9, 16, 17)] == [1, 1, 1, 2, 2, 3]
    assert sequence_bytes(layout, 9) == sequence_bytes(layout, 16) == sequence_bytes(layout, 8) + layout.page_bytes


@pytest.mark.parametrize("formats", [None, BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("cfg", [TINY, LAB, WINDOW_ONLY], ids=["tiny", "lab", "window-only"])
def test_the_arrays_measure_the_same(cfg, formats):
    tokens, sequences = 3 * cfg.page_size - 1, 5
    report = kv_report(cfg, tokens, formats, sequences)
    cfg = cfg.replace(**{f"{cache}_format": name for cache, name in (formats or {}).items()})
    cache = ModelCache.empty(cfg, num_pages=sequences * report["pages"], num_slots=sequences)
    reported = {row["part"]: row["bytes"] for row in report["bytes_of_a_pool"]}
    assert reported["global pages"] == cache.pages.nbytes
    assert reported["window rings"] == cache.ring.nbytes
    assert reported["compressor state"] == cache.state.nbytes
    lengths = cache.length.nbytes  # bookkeeping, 4 B per slot, not KV
    assert reported["sum"] == sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) - lengths
    assert reported["sum"] == sequences * report["sequence_bytes"]
    assert report["bytes_per_token"] == cache.pages.nbytes / (sequences * report["pages"] * cfg.page_size)


def test_rows_add_up():
    report = kv_report(LAB, 1000)
    assert sum(row["bytes_per_page"] for row in report["bytes_per_token_by_layer"]) == report["page_bytes"]
    assert sum(row["bytes_per_token"] for row in report["bytes_per_token_by_layer"]) == report["bytes_per_token"]
    assert sum(row["bytes"] for row in report["fixed_bytes_per_sequence"]) == report["fixed_bytes"]
    last = report["bytes_per_sequence_by_length"][-1]
    assert (last["tokens"], last["total_bytes"]) == (1000, report["sequence_bytes"])


def test_without_a_global_branch_only_the_fixed_part_is_left():
    report = kv_report(WINDOW_ONLY, 1024)
    assert report["bytes_per_token"] == 0 and report["bytes_per_token_by_layer"] == []
    assert report["sequence_bytes"] == report["fixed_bytes"] == 6 * 10 * 33
    assert [row["change"] for row in report["alternatives"]] == ["this configuration"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "context=0 must be a whole number"),
        ((10**320,), r"context must be at most 2\^40"),
        ((1.5,), "context=1.5 must be a whole number"),
        ((8, None, 0), "sequences=0 must be a whole number"),
        ((8, {"ring": "bf16"}), "names cache 'ring', must be one of main, index, window"),
        ((8, {"main": "fp5"}), "main_format='fp5' must be one of fp4_e4m3, mxfp4"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kv_report(TINY, *arguments)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (890, "890 B"), (1024, "1 KiB"), (2**20 - 1, "1024 KiB"), (933_232_640, "890 MiB")],
)
def test_human_sizes(nbytes, text):
    assert human_size(nbytes) == text


def test_command_prints_tables_that_hold_the_sums(capsys):
    assert cli.main(["kv", str(CONFIGS / "v41_flash.json"), "--context", "1M"]) == 0
    printed = capsys.readouterr().out
    for text in ("113,920", "22,784", "1,415,040", "936,373,280", "10,324", "…"):
        assert (text in printed) == (text != "…")  # no cell is cut


def test_command_prints_the_report_as_json(capsys):
    assert cli.main(["kv", "tiny", "--format", "main=bf16", "--sequences", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(kv_report(TINY, TINY.max_position_embeddings, {"main": "bf16"}, 2)))
