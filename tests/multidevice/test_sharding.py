"""The steps on a mesh of 8 virtual CPU devices, in a process of its own: equal to one device, really distributed."""

import functools
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import pytest

from dsflash_jax import sharding, steps
from tests.multidevice.cases import CASES, PLAIN, WHOLE

ROOT = pathlib.Path(__file__).parents[2]


class Mesh:
    """Sizes alone: what is checked before anything is placed."""

    def __init__(self, **sizes):
        self.shape = {"data": 1, "tensor": 1, "expert": 1} | sizes


@functools.lru_cache
def seen(case):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.multidevice.program", case, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


both_cases = pytest.mark.parametrize("case", CASES)


@pytest.mark.slow
@both_cases
def test_eight_devices_compute_what_one_does(case):
    found = seen(case)
    assert found["devices"] == 8
    assert max(*found["gaps"].values(), *found["replay_gaps"].values()) <= 1e-5
    assert found["bytes_differ"] == 0
    assert found["lengths"] == [13 + 1 + 1, 9 + 1 + 3], "each group commits its own counts"


SHARES = {
    "layers.1.ffn.experts.w1.weight": 0, "layers.1.attn.wq_b.weight": 0, "layers.1.attn.wo_a.weight": 0,
    "layers.1.attn.wo_b.weight": 1, "layers.1.attn.attn_sink": 0, "embed.weight": 0, "head.weight": 0,
    "cache.pages": 0, "cache.ring": 0, "cache.state": 0,
}  # fmt: skip
WHOLE_SHARES = SHARES | {
    "layers.1.ffn.experts.w1.scale": 0, "layers.1.ffn.experts.w2.weight": 0, "layers.1.ffn.experts.w2.scale": 0,
    "layers.1.attn.wq_b.scale": 0, "layers.1.attn.wo_b.weight": 0, "layers.1.attn.wo_b.scale": 0,
    "layers.2.attn.indexer.wq_b.weight": 0, "layers.2.attn.indexer.wq_b.scale": 0,
    "layers.1.engram.embed.weight": 1, "layers.1.engram.embed.scale": 1,
    "mtp.0.ffn.experts.w3.weight": 0, "mtp.0.ffn.experts.w3.scale": 0, "mtp.0.attn.wq_b.weight": 0,
    "mtp.0.markov_head.embed.weight": 0, "mtp.0.markov_head.head.weight": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "axis"),
    [("plain", *share) for share in SHARES.items()] + [("whole", *share) for share in WHOLE_SHARES.items()],
)
def test_a_device_holds_its_share_only(case, name, axis):
    whole, shard = seen(case)["shards"][name]
    assert shard[axis] * 2 == whole[axis]
    assert [n for i, n in enumerate(shard) if i != axis] == [n for i, n in enumerate(whole) if i != axis]


@pytest.mark.slow
@both_cases
def test_no_arena_no_expert_weight_and_no_table_is_gathered(case):
    """Only activations move: no pool, expert, packed weight or table, whole or a share. Codes are read in place."""
    found = seen(case)
    moving = found["collectives"]
    assert moving.keys() == {"prefill", "decode", "verify"} | ({"draft"} if case == "whole" else set())
    assert all(moving.values()), "a mesh of eight without one collective computes eight times the same"
    names = [name for of_step in moving.values() for name in of_step]
    results = [re.search(r" (\w+)\[([\d,]*)\]", name).groups() for name in names]
    shapes = [(kind, tuple(map(int, shape.split(",")))) for kind, shape in results]
    moved, codes = {shape for _, shape in shapes}, {shape for kind, shape in shapes if kind == "u8"}
    stays = (".experts.", "cache.", ".engram.embed.", "embed.weight")
    stays += (".wq_b.", ".wo_b.") if case == "whole" else ()
    shares = {tuple(s) for name, both in found["shards"].items() if any(part in name for part in stays) for s in both}
    assert not {shape for shape in moved & shares if math.prod(shape) > 64}
    # Codes that move are n-gram rows on their way to their tokens: at most 16 tokens with 6 rows of 33 bytes each. The
    # 6 rows of a single token go in two halves.
    assert all({3, 6} & set(shape) and math.prod(shape) <= 16 * 6 * 33 for shape in codes)
    assert case == "whole" or not codes


def test_packed_weights_lie_with_their_scales():
    """Every scale of the tree has its codes' specification, and only a packed wo_b is split by its outputs."""
    for cfg in CASES.values():
        params = steps.abstract_params(cfg)
        leaves = jax.tree_util.tree_leaves_with_path(
            sharding.param_specs(params), is_leaf=lambda spec: isinstance(spec, jax.sharding.PartitionSpec)
        )
        specs = {tuple(key.key for key in path): spec for path, spec in leaves}
        scales = [path for path in specs if path[-1] == "scale"]
        assert all(specs[path] == specs[(*path[:-1], "weight")] for path in scales)
        assert len(scales) == (0 if cfg is PLAIN else 4 * 10 + 2 * 1 + 1), "layers, tables and indexer"
        split = sharding._COLUMNS if cfg is PLAIN else sharding._ROWS
        assert specs["layers", 1, "attn", "wo_b", "weight"] == split


@pytest.mark.parametrize(("sizes", "sentence"), [
    ({"data": 0}, "data=0 must be at least 1"),
    ({"data": 64, "tensor": 64}, "a mesh of 64 x 64 x 1 needs 4096 devices"),
])  # fmt: skip
def test_a_mesh_that_cannot_be_made_is_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.make_mesh(**sizes)


@pytest.mark.parametrize(
    ("cfg", "axis", "sentence"),
    [
        (PLAIN, {"tensor": 3}, "num_attention_heads=4 must be divisible by the mesh's tensor=3"),
        (PLAIN, {"expert": 3}, "n_routed_experts=8 must be divisible by the mesh's expert=3"),
        (WHOLE, {"expert": 8}, "dspark_n_routed_experts=4 must be divisible by the mesh's expert=8"),
        (
            WHOLE.replace(engram_head_dim=32),
            {"tensor": 2},
            "engram_head_dim=32 must be divisible by the mesh's tensor=2 into multiples of 32, which share a scale",
        ),
        (WHOLE.replace(hidden_size=32), {"tensor": 2}, "hidden_size=32 must be divisible by the mesh's tensor=2 into"),
    ],
)
def test_an_axis_that_does_not_divide_is_refused(cfg, axis, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.check_mesh(cfg, Mesh(**axis))


def test_a_step_that_does_not_exist_has_no_hlo():
    with pytest.raises(ValueError, match="step='train' must be one of prefill, verify, draft"):
        sharding.lower("train", None, None, [], PLAIN, Mesh())
