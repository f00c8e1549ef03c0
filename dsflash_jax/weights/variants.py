"""Telling checkpoints in another layout from damaged ones: a variant that is known is refused by its name."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from dsflash_jax.config_rules import QUANT_BLOCK

READ = (
    "What is read is the released layout: names without a prefix, FP8 weights in 32x32 blocks and FP4 experts "
    "with UE8M0 scales named `.scale`, or no packed weights at all"
)
_METHODS = {
    "awq": "an AWQ", "gptq": "a GPTQ", "compressed-tensors": "a compressed-tensors", "bitsandbytes": "a bitsandbytes",
    "modelopt": "a ModelOpt (NVFP4)", "mxfp4": "an MXFP4", "mxfp8": "an MXFP8", "quark": "a Quark", "hqq": "an HQQ",
    "fbgemm_fp8": "an FBGEMM FP8", "auto-round": "an AutoRound", "torchao": "a torchao",
}  # fmt: skip
# Ends and beginnings of names that only one other layout has, the more telling ones first.
_ENDS = {
    ".qzeros": "an AWQ or GPTQ", ".qweight": "an AWQ or GPTQ", ".weight_packed": "a compressed-tensors",
    ".weight_scale_2": "a ModelOpt (NVFP4)", ".absmax": "a bitsandbytes",
    ".weight_scale_inv": "a `weight_scale_inv` (FP8 in 128x128 blocks, as DeepSeek-V3)",
    ".weight_scale": "a compressed-tensors", ".scales": "an MLX-quantised",
}  # fmt: skip
_MLX_PARTS = (".switch_mlp.", "embed_tokens", ".self_attn.")
_FILES = {"*.gguf": "a GGUF", "pytorch_model*.bin": "a PyTorch pickle", "*.index.pt": "a PyTorch pickle"}
_MODELS = ("deepseek_v4", "deepseek_v32", "deepseek_v3", "deepseek_v2", "deepseek")


def refuse_variant(folder: pathlib.Path, config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises ValueError with one sentence if files, config or tensor names show a layout that is not read.

    Sources: names and keys of those layouts as their own tools write them; checkpoint facts in contract.md.
    """
    found = _by_config(config) or _by_names(names)
    if not found and not names:
        found = next((variant for pattern, variant in _FILES.items() if any(folder.glob(pattern))), None)
    if found:
        raise ValueError(f"{folder} is {found} checkpoint, which is not read. {READ}.")


def _by_config(config: Mapping[str, Any]) -> str | None:
    inner = config.get("text_config")
    parts = [config, *([inner] if isinstance(inner, Mapping) else [])]
    for part in parts:
        if part.get("model_type") in _MODELS:
            return f"a {part['model_type']}"
        if isinstance(part.get("quantization"), Mapping):  # the key of MLX's own converter
            return "an MLX-quantised"
        quantised = part.get("quantization_config")
        if not isinstance(quantised, Mapping):
            continue
        method = quantised.get("quant_method")
        if method in _METHODS:
            return _METHODS[method]
        block = quantised.get("weight_block_size")
        if method == "fp8" and isinstance(block, list) and block != [QUANT_BLOCK, QUANT_BLOCK]:
            return f"an FP8 {'x'.join(map(str, block))}-block"
        if method == "fp8" and block is None and "ignored_layers" in quantised:
            return "an FP8 per-tensor"
    return None


def _by_names(names: Collection[str]) -> str | None:
    for end, variant in _ENDS.items():
        if any(name.endswith(end) for name in names):
            return variant
    prefixed = [name for name in names if name.startswith(("model.", "language_model."))]
    if any(part in name for name in prefixed for part in _MLX_PARTS):
        return "an MLX- or transformers-converted (`model.`-prefixed)"
    return "a `model.`-prefixed" if prefixed else None
