"""The table of layer roles: the published one for the released shape, and each fact of it for odd ones."""

import json
from collections import Counter
from pathlib import Path

import pytest

from dsflash_jax import cli
from dsflash_jax.config import ModelConfig
from dsflash_jax.roles import kv_owners, layer_roles, roles_table

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RELEASED = ModelConfig.from_json(CONFIGS / "v41_flash.json")
TINY = ModelConfig.from_json(CONFIGS / "tiny.json")


def layers(label: str) -> list[int]:
    return [role.layer for role in layer_roles(RELEASED) if role.label == label]


def test_released_labels_are_the_published_ones():
    assert layers("SWA") == [0, 1]
    assert layers("Full") == [2, 8, 14, 20]
    assert layers("Reindex") == [24, 28, 32, 36]
    assert layers("Reuse") == [*range(3, 8), *range(9, 14), *range(15, 20), *(
        layer for start in (20, 24, 28, 32, 36) for layer in range(start + 1, start + 4)
    )]  # fmt: skip
    assert Counter(role.label for role in layer_roles(RELEASED)) == {"SWA": 2, "Full": 4, "Reindex": 4, "Reuse": 30}


def test_released_decoder_starts_at_layer_20():
    assert [role.side for role in layer_roles(RELEASED)] == ["encoder"] * 20 + ["decoder"] * 20


def test_released_ratios_and_rope_tables():
    assert [role.ratio for role in layer_roles(RELEASED)] == [0] * 2 + [2] * 18 + [1] * 20
    assert [role.rope for role in layer_roles(RELEASED)] == ["swa"] * 2 + ["compressed"] * 38


def test_released_sources_of_every_layer():
    roles = layer_roles(RELEASED)
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    index = kv[:20] + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [role.kv_source for role in roles] == kv
    assert [role.index_source for role in roles] == index


def test_released_candidates_are_built_once_and_read_by_later_indexers_only():
    roles = layer_roles(RELEASED)
    assert [role.layer for role in roles if role.builds_candidates] == [20]
    assert [role.layer for role in roles if role.reads_candidates] == [24, 28, 32, 36]
    assert [role.layer for role in kv_owners(RELEASED)] == [2, 8, 14, 20]


def test_facts_agree_with_each_other():
    for cfg in (RELEASED, TINY, ModelConfig.from_json(CONFIGS / "lab.json")):
        for role in layer_roles(cfg):
            assert role.owns_kv <= role.indexes <= (role.ratio > 0)
            assert (role.kv_source == role.layer) == role.owns_kv
            assert (role.index_source == role.layer) == role.indexes
            assert (role.kv_source is None) == (role.ratio == 0) == (role.rope == "swa")
            if role.ratio:
                assert role.kv_source <= role.index_source <= role.layer
                assert cfg.layer_ratios[role.kv_source] == role.ratio


def test_without_a_kv_source_every_layer_is_an_encoder_layer():
    bare = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "candidate_source_layer_id": -1}
    roles = layer_roles(TINY.replace(compress_ratios=(0,) * 6, **bare))
    assert {(role.label, role.side, role.kv_source) for role in roles} == {("SWA", "encoder", None)}


def test_a_window_layer_may_stand_between_global_ones():
    roles = layer_roles(TINY.replace(compress_ratios=(0, 0, 2, 0, 1, 1)))
    assert [role.label for role in roles] == ["SWA", "SWA", "Full", "SWA", "Full", "Reindex"]
    assert roles[3].kv_source is None and roles[3].rope == "swa"


def test_draft_layers_have_no_role():
    assert len(layer_roles(RELEASED)) == 40 and len(RELEASED.compress_ratios) == 43


def test_rows_for_printing_hold_every_fact():
    rows = roles_table(TINY)
    assert json.loads(json.dumps(rows)) == rows
    assert {**rows[5]} == {
        "layer": 5, "label": "Reindex", "ratio": 1, "owns_kv": False, "indexes": True, "builds_candidates": False,
        "reads_candidates": True, "kv_source": 4, "index_source": 5, "rope": "compressed", "side": "decoder",
    }  # fmt: skip


def printed_rows(capsys, *arguments: str) -> list[list[str]]:
    assert cli.main(["roles", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


@pytest.mark.parametrize("name", [str(CONFIGS / "v41_flash.json"), "v41_flash"], ids=["file", "name"])
def test_command_prints_one_whole_row_per_layer(capsys, name):
    rows = printed_rows(capsys, name)
    assert [row[:2] for row in rows] == [[str(role.layer), role.label] for role in layer_roles(RELEASED)]
    cell = {True: "yes", False: "", None: "-"}
    for row, facts in zip(rows, roles_table(RELEASED), strict=True):
        values = [facts.pop("layer"), facts.pop("label"), *facts.values()]
        assert row == [cell[v] if isinstance(v, bool) or v is None else str(v) for v in values]
