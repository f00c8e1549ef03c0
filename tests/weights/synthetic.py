"""Checkpoints in the released layout at tiny widths, written without the package's own writer."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np

from dsflash_jax.config import ModelConfig

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
STORED = {
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "I8", "bfloat16": "BF16",
    "float32": "F32",
}  # fmt: skip
RAW = "U8"  # bytes that say nothing about what they are
INDEX = "model.safetensors.index.json"


def golden_tensors(case):
    """(config, {name: (stored dtype, array)}) of a recorded model: uint8 codes, floats as float32."""
    weights = np.load(GOLDEN / f"{case}.weights.npz")
    reference = json.loads(str(weights["config_json"]))
    tensors = {
        key.removeprefix("w/"): (STORED[str(weights["wdt/" + key.removeprefix("w/")])], weights[key])
        for key in weights.files
        if key.startswith("w/")
    }
    return ModelConfig.from_json(reference), tensors


def released_config(cfg):
    """config.json with upstream keys, the text part nested, packed weights as the release says it."""
    text = {k: v for k, v in cfg.to_dict().items() if k not in ("quant_method", "expert_dtype")}
    quantised = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    if cfg.quant_method:
        text["quantization_config"] = quantised
    return {"model_type": "deepseek_v41", "text_config": text, "vision_config": None}


def write_shard(path, tensors, metadata=True):
    """One safetensors file: {name: (dtype, array)} in the given order."""
    header, data = {"__metadata__": {"format": "pt"}} if metadata else {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.asarray(array).astype(NUMPY[dtype]).tobytes() if dtype in NUMPY else np.asarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    write_raw(path, json.dumps(header, separators=(",", ":")).encode(), data)


def write_raw(path, header, data):
    header += b" " * (-len(header) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(header)) + header + data)


# The order of tensors in a file that the format's own library writes.
RANK = ["U8", "I8", "F8_E4M3", "F8_E8M0", "BF16", "F32"]


def write_checkpoint(folder, cfg, tensors, shards=3):
    """A folder of several shards; tensors are dealt out in turn, so that neighbours lie in different files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        own = [name for name in tensors if places[name] == file]
        own.sort(key=lambda name: (-RANK.index(tensors[name][0]), name))
        write_shard(folder / file, {name: tensors[name] for name in own})
    total = sum(
        array.size * (np.dtype(NUMPY[dtype]).itemsize if dtype in NUMPY else 1) for dtype, array in tensors.values()
    )
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(released_config(cfg)))
    return folder


def edit_header(path, change):
    """Rewrites a shard's header: `change(header)` alters it in place; the data stay as they are."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_raw(path, json.dumps(header, separators=(",", ":")).encode(), raw[8 + length :])


def shard_of(folder, name):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
