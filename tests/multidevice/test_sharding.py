"""The steps on a mesh of 8 virtual CPU devices, in a process of its own: equal to one device, really distributed."""

import json
import pathlib
import subprocess
import sys

import pytest

from dsflash_jax import sharding
from tests.model.running import shallow

ROOT = pathlib.Path(__file__).parents[2]
CFG = shallow(n_routed_experts=8)


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run(
        [sys.executable, "-m", "tests.multidevice.program"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eight_devices_compute_what_one_does(seen):
    assert seen["devices"] == 8
    assert max(*seen["gaps"].values(), *seen["replay_gaps"].values()) <= 1e-5
    assert seen["bytes_differ"] == 0
    assert seen["lengths"] == [13 + 1 + 1, 9 + 1 + 3], "each group commits its own counts"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis", "parts"), [
    ("experts.w1", 0, 2), ("wq_b", 0, 2), ("wo_b", 1, 2), ("attn_sink", 0, 2), ("embed", 0, 2), ("head", 0, 2),
    ("pages", 0, 2), ("ring", 0, 2), ("state", 0, 2),
])  # fmt: skip
def test_a_device_holds_its_share_only(seen, name, axis, parts):
    whole, shard = seen["shards"][name]
    assert shard[axis] * parts == whole[axis]
    assert [n for i, n in enumerate(shard) if i != axis] == [n for i, n in enumerate(whole) if i != axis]


@pytest.mark.slow
def test_no_arena_and_no_expert_weight_is_gathered(seen):
    """Only activations move: an arena is uint8, and no expert matrix with a leading expert axis crosses devices."""
    d, f, experts = CFG.hidden_size, CFG.moe_intermediate_size, CFG.n_routed_experts
    moved, whole = seen["collectives"], (" u8[", f"[{experts},{f},{d}]", f"[{experts},{d},{f}]")
    assert moved, "a mesh of eight without one collective computes eight times the same"
    assert not [name for name in moved if any(part in name for part in whole)]


@pytest.mark.parametrize(("sizes", "sentence"), [
    ({"data": 0}, "data=0 must be at least 1"),
    ({"data": 64, "tensor": 64}, "a mesh of 64 x 64 x 1 needs 4096 devices"),
])  # fmt: skip
def test_a_mesh_that_cannot_be_made_is_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        sharding.make_mesh(**sizes)


@pytest.mark.parametrize(("axis", "field"), [("tensor", "num_attention_heads"), ("expert", "n_routed_experts")])
def test_an_axis_that_does_not_divide_is_refused(axis, field):
    class Mesh:
        shape = {"data": 1, "tensor": 1, "expert": 1} | {axis: 3}

    with pytest.raises(ValueError, match=f"{field}=. must be divisible by the mesh's {axis}=3"):
        sharding.check_mesh(CFG, Mesh)
