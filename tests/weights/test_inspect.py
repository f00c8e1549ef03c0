"""`dsflash inspect`: the published sizes from shapes alone, and what a folder holds, lacks and should not hold."""

import json
import pathlib

import numpy as np
import pytest

from dsflash_jax import cli
from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.inspect import inspect
from dsflash_jax.weights.load import abstract_params
from dsflash_jax.weights.names import released_shapes, role_of
from dsflash_jax.weights.shapes import draft_shapes, engram_shapes, expected_shapes, parameter_counts, part_of
from tests.model import running
from tests.weights import synthetic

ROOT = pathlib.Path(__file__).resolve().parents[2]
CFG, TENSORS = synthetic.golden_tensors("G")


@pytest.mark.slow
def test_the_released_shape_has_the_published_sizes():
    """Billions: 551.5 backbone, 196.6 Engram, 15.8 active in decode with the head, 7.6 in the encoder."""
    counts = inspect(ROOT / "configs" / "v41_flash.json")["parameters"]
    billions = {key: round(value / 1e9, 1) for key, value in counts.items() if key != "parts"}
    assert billions["backbone"] == 551.5 and billions["engram_tables"] == 196.6
    assert billions["active_decode"] == 15.8 and billions["active_encoder"] == 7.6
    sums = ("backbone", "hyper_connections", "engram_tables", "engram_other", "drafts")
    assert counts["total"] == sum(counts[key] for key in sums)
    parts = {row["part"]: row for row in counts["parts"]}
    assert sum(row["active_decode"] for row in parts.values()) == counts["active_decode"]
    assert parts["routed experts"]["parameters"] == 40 * 384 * 3 * 5120 * 2304
    assert parts["routed experts"]["active_decode"] == 40 * 6 * 3 * 5120 * 2304


def test_counts_are_those_of_the_real_arrays():
    cfg = running.tiny()
    sizes = {name: int(np.prod(shape)) for name, shape in released_shapes(running.parameters(cfg)).items()}
    counts = parameter_counts(cfg)
    assert counts["total"] == counts["backbone"] + counts["hyper_connections"] == sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    spared = experts * (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) + sizes["embed.weight"] - cfg.hidden_size
    assert counts["active_decode"] == sum(sizes.values()) - spared
    decoder = max(cfg.kv_source_layer_ids)
    below = {n: s for n, s in sizes.items() if n.startswith("layers.") and int(n.split(".")[1]) < decoder}
    experts = sum(size for name, size in below.items() if ".experts." in name)
    idle = experts * (1 - cfg.num_experts_per_tok / cfg.n_routed_experts)
    assert counts["active_encoder"] == sum(below.values()) - idle + cfg.hidden_size


def test_packed_weights_count_like_the_values_that_they_stand_for():
    assert parameter_counts(CFG) == parameter_counts(CFG.replace(quant_method="", expert_dtype=""))


@pytest.mark.parametrize(
    ("case", "role", "shapes"), [("D", "engram", engram_shapes), ("E", "drafts", draft_shapes)], ids=["D", "E"]
)
def test_parts_beside_the_backbone_have_the_recorded_names_and_shapes(case, role, shapes):
    cfg, tensors = synthetic.golden_tensors(case)
    assert shapes(cfg) == {name: array.shape for name, (_, array) in tensors.items() if role_of(name) == role}
    in_tree = {n: s for n, s in released_shapes(abstract_params(cfg)).items() if role_of(n) == role}
    assert in_tree == shapes(cfg), "the tree and the written-out shapes disagree"


def test_shapes_of_the_released_extras():
    cfg = ModelConfig.from_json(ROOT / "configs" / "v41_flash.json")
    shapes = engram_shapes(cfg) | draft_shapes(cfg)
    assert shapes["layers.14.engram.embed.weight"] == (384016682, 256)
    assert shapes["layers.1.engram.wkv.weight"] == (5 * 5120, 3 * 8 * 256)
    assert shapes["mtp.0.main_proj.weight"] == (5120, 3 * 5120)
    assert shapes["mtp.2.markov_head.head.weight"] == (129280, 256)
    assert len([n for n in shapes if n.startswith("mtp.1.ffn.experts.") and n.endswith("w1.weight")]) == 128


def test_every_part_has_a_name():
    parts = {part_of(name) for name in expected_shapes(CFG)}
    assert parts == {
        "embedding", "head", "attention", "compressor", "indexer", "router", "routed experts", "shared expert",
        "hyper-connections", "norms",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return synthetic.write_checkpoint(tmp_path / "model", CFG, TENSORS)


def test_a_complete_folder_is_reported_by_role_type_and_file(folder):
    report = inspect(folder)
    assert report["complete"] and report["missing"] == report["unexpected"] == report["other_shape"] == []
    assert report["roles"] == [{"role": "backbone", "tensors": len(TENSORS), "bytes": report["bytes"]}]
    index = json.loads((folder / synthetic.INDEX).read_text())
    assert report["bytes"] == index["metadata"]["total_size"] == sum(row["bytes"] for row in report["files"])
    stored = [dtype for dtype, _ in TENSORS.values()]
    assert {row["dtype"]: row["tensors"] for row in report["element_types"]} == {d: stored.count(d) for d in stored}
    assert report["parameters"] == parameter_counts(CFG)


def test_what_is_missing_unexpected_or_of_another_shape_is_named(tmp_path, capsys):
    tensors = {name: value for name, value in TENSORS.items() if name != "layers.0.attn.wkv.scale"}
    tensors |= {"layers.9.extra": ("F32", np.zeros(2, np.float32)), "norm.weight": ("BF16", np.zeros(3, np.float32))}
    tensors["mtp.0.main_norm.weight"] = ("BF16", np.zeros(64, np.float32))
    tensors["vision.norm.weight"] = ("BF16", np.zeros(64, np.float32))
    folder = synthetic.write_checkpoint(tmp_path / "model", CFG, tensors)
    report = inspect(folder)
    assert report["missing"] == ["layers.0.attn.wkv.scale"]
    assert report["unexpected"] == ["layers.9.extra", "mtp.0.main_norm.weight"]
    assert report["other_shape"] == ["norm.weight"] and not report["complete"]
    assert {row["role"]: row["tensors"] for row in report["roles"]}.items() >= {"drafts": 1, "vision": 1}.items()
    assert cli.main(["inspect", str(folder)]) == 1
    assert "layers.0.attn.wkv.scale" in capsys.readouterr().out


def test_the_command_prints_tables_or_json_and_refuses_damage_in_one_sentence(folder, capsys):
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is True
    assert cli.main(["inspect", "tiny"]) == 0
    assert "active decode" in capsys.readouterr().out
    shard = synthetic.shard_of(folder, "norm.weight")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert cli.main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and shard.name in error
