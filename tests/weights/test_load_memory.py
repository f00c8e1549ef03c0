"""Loading a gigabyte takes no second copy: the peak above the parameters themselves is bounded."""

import json
import math
import pathlib
import subprocess
import sys

import pytest

from dsflash_jax.config import ModelConfig
from dsflash_jax.weights.export import config_json
from dsflash_jax.weights.load import abstract_params
from dsflash_jax.weights.names import released_names, released_shapes, stored_dtype, walk
from dsflash_jax.weights.shards import DTYPE_BYTES
from tests.weights import synthetic

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]
GB = 10**9
MOST_BEYOND = 0.25 * GB
CFG = ModelConfig(
    vocab_size=32768, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, head_dim=64, q_lora_rank=256,
    qk_rope_head_dim=16, o_groups=2, o_lora_rank=256, moe_intermediate_size=1024, n_routed_experts=14,
    num_experts_per_tok=2, sliding_window=16, compress_ratios=(0, 2, 1, 1), kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3), index_n_heads=4, index_head_dim=64, index_topk=8, max_position_embeddings=128,
)  # fmt: skip
PROGRAM = """
import json, sys
import jax
from dsflash_jax.weights.load import load_checkpoint

def kilobytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key + ":"))

jax.block_until_ready(jax.device_put(0.0))
before = 1024 * kilobytes("VmRSS")
loaded = load_checkpoint(sys.argv[1], dequantise=sys.argv[2] == "dequantise")
held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
print(json.dumps({"before": before, "peak": 1024 * kilobytes("VmHWM"), "parameters": held}))
"""


def write_sparse(folder, cfg, shards):
    """A checkpoint of `cfg` whose files are zeros that take no room on disk, but do in memory."""
    folder.mkdir()
    abstract = abstract_params(cfg)
    leaves, shapes = dict(walk(abstract)), released_shapes(abstract)
    headers, sizes, places = [{} for _ in range(shards)], [0] * shards, {}
    for i, (name, (path, _)) in enumerate(released_names(abstract).items()):
        at, dtype = i % shards, stored_dtype(name, leaves[path].dtype, cfg)
        end = sizes[at] + math.prod(shapes[name]) * DTYPE_BYTES[dtype]
        headers[at][name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [sizes[at], end]}
        sizes[at], places[name] = end, f"model-{at}.safetensors"
    for at, (header, size) in enumerate(zip(headers, sizes, strict=True)):
        file = folder / f"model-{at}.safetensors"
        synthetic.write_raw(file, json.dumps(header).encode(), b"")
        with open(file, "r+b") as stream:
            stream.truncate(file.stat().st_size + size)
    (folder / synthetic.INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config_json(cfg)))
    return sum(sizes)


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads the peak from /proc, as on Linux")
@pytest.mark.parametrize(
    ("changes", "mode", "least"),
    [
        ({}, "as stored", 0.9 * GB),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "dequantise", 0.9 * GB),
        ({"quant_method": "fp8", "expert_dtype": "fp4", "n_routed_experts": 128}, "as stored", 0.9 * GB),
    ],
    ids=["bfloat16-to-float32", "dequantised", "kept-packed"],
)
def test_loading_a_gigabyte_peaks_little_above_the_parameters(tmp_path, changes, mode, least):
    stored = write_sparse(tmp_path / "model", CFG.replace(**changes), shards=3)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), mode]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    seen = json.loads(run.stdout)
    beyond = seen["peak"] - seen["before"] - seen["parameters"]
    print(f"{stored:,} B on disk, {seen['parameters']:,} B of parameters, peak {beyond:,} B beyond them")
    assert least < seen["parameters"] < 1.5 * GB
    assert beyond <= MOST_BEYOND
