"""Unit files of the released reference: single operations, judged with this package's own.

`units_quant`: codes, scales and values of the KV formats, bit for bit. `units_ops`: one function of `ops/` per part.
`units_engram`: constants and row numbers of the n-gram hashes.
An array counts as consumed when a rule compares it or takes it as input; any other array fails.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import steps
from dsflash_jax.batch import Chunk, bucket, make_step
from dsflash_jax.cache.model_cache import ModelCache
from dsflash_jax.config import ModelConfig, RopeScaling
from dsflash_jax.modules.dspark import float_rows, window_positions
from dsflash_jax.numerics import minifloat
from dsflash_jax.numerics.formats import get_format
from dsflash_jax.ops import compressor, hyper_connections, indexer, moe, norms, packed, rope
from dsflash_jax.ops.linear import linear, linear_f32
from dsflash_jax.parity.rules import differing_rows, ring_positions
from dsflash_jax.parity.units_engram import (
    RELEASED_COMPRESSED,
    RELEASED_LAYERS,
    judge_constants,
    judge_rows,
    judge_token_map,
)
from dsflash_jax.parity.verdicts import (
    TABLE_ATOL,
    Verdict,
    identical,
    unruled,
    within_ulp,
)
from dsflash_jax.parity.verdicts import within_atol as _within_atol
from dsflash_jax.types import DraftStep
from pallas_kernels.candidate_select.api import candidate_select
from pallas_kernels.compress_pool.xla import pool
from pallas_kernels.indexer_scores.xla import block_maxima
from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.row_set import RowSet

# Parts of the released model that this package does not build yet: file -> key prefix -> name.
UNBUILT = {
    "units_ops": {"image/": "image tokens"},
}
QUANTISERS = {"act_quant_b32_ue8m0": "mxfp8", "fp4_b16_e4m3": "fp4_e4m3", "fp4_b32_e8m0": "mxfp4"}
# Float32 sums in another order, relative to the largest value of a row.
FLOAT_RTOL = 2e-6
# What the unit file does not record, found by fitting all of its cases: the gate's temperature and scale, the eps.
GATE_TEMP, GATE_SCALE, NORM_EPS, HC_EPS = 0.7, 1.5, 1e-6, 1e-6
# file -> what its row says about such values: a file recorded with others would fail for no fault of the model.
ASSUMED = {
    "units_ops": f"assumed, as the file does not say: gate temperature {GATE_TEMP} and scale {GATE_SCALE}, "
    f"eps {NORM_EPS:g} of compressor norm and Sinkhorn",
    "units_engram": f"assumed, as the file does not say: released layers {RELEASED_LAYERS} and "
    f"{RELEASED_COMPRESSED} compressed ids",
}


class Unit:
    """The arrays of one file, and which of them a rule has taken."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.taken = arrays, set()
        self.verdicts: list[Verdict] = []

    def __getitem__(self, key: str) -> np.ndarray:
        self.taken.add(key)
        return self.arrays[key]

    def names(self, pattern: str) -> list[re.Match]:
        """Matches of the whole key with `pattern`, in file order."""
        return [m for m in (re.fullmatch(pattern, key) for key in self.arrays) if m]

    def exact(self, key: str, ours) -> None:
        """`ours` must equal the array; floats by their bits, so that -0 counts (any NaN equals any NaN)."""
        golden, ours = self[key], np.asarray(ours)
        if golden.dtype.kind == "f" and golden.shape == ours.shape:
            bits = [np.where(np.isnan(a), np.nan, a).astype(np.float32).view(np.uint32) for a in (golden, ours)]
            golden, ours = bits
        self.verdicts.append(identical(key, golden, ours))

    def close(self, key: str, ours, atol: float | None = None) -> None:
        """Within `atol`, or else within FLOAT_RTOL of the row's largest magnitude (at least of 1)."""
        golden, ours = self[key], np.asarray(ours, np.float32)
        if golden.shape != ours.shape:
            self.verdicts.append(identical(key, golden, ours))
            return
        unit = 1.0 if atol else np.maximum(1.0, np.max(np.abs(golden), axis=-1, keepdims=True, initial=0.0))
        self.verdicts.append(_within_atol(key, golden / unit, ours / unit, atol or FLOAT_RTOL))

    def ulp(self, key: str, ours: jax.Array) -> None:
        """Within one bfloat16 unit in the last place of the row's largest value."""
        self.verdicts.append(within_ulp(key, self[key], np.asarray(ours.astype(jnp.float32))))

    def result(self) -> list[Verdict]:
        """All verdicts, failures for what no rule took."""
        return self.verdicts + [unruled(key) for key in self.arrays if key not in self.taken]


def judge_units(name: str, arrays: dict[str, np.ndarray]) -> tuple[list[Verdict], list[str]]:
    """(verdicts on every array, parts of the file that are not built yet). No verdicts where nothing is built."""
    skipped = {p: part for p, part in UNBUILT.get(name, {}).items() if any(key.startswith(p) for key in arrays)}
    unit = Unit({key: value for key, value in arrays.items() if not key.startswith(tuple(skipped))})
    for part in PARTS.get(name, ()):
        part(unit)
    return unit.result(), sorted(skipped.values())


def _quantisers(unit: Unit) -> None:
    """Bytes of a packed row are codes, then scales; both and the values they stand for are compared."""
    for match in unit.names(r"(\w+)/(f32|bf16)/x"):
        name, dtype = match.groups()
        if name not in QUANTISERS:
            continue
        at, fmt, golden_x = f"{name}/{dtype}/", get_format(QUANTISERS[name]), unit[match[0]]
        x = jnp.asarray(golden_x, jnp.bfloat16 if dtype == "bf16" else jnp.float32)
        packed = np.asarray(jax.jit(fmt.pack)(x))
        width = golden_x.shape[-1]
        code_bytes = width * fmt.element.bits // 8
        unit.exact(at + "codes_u8", packed[:, :code_bytes])
        unit.exact(at + "scale_u8", packed[:, code_bytes:])
        scales = packed[:, code_bytes:].astype(np.uint32)
        unit.exact(at + "scale_f32", fmt.scale.multiply(jnp.ones(scales.shape, jnp.float32), scales))
        unit.exact(at + "dequant", jax.jit(fmt.unpack, static_argnums=1)(packed, width))
        unit.taken.add(f"{name}/row_names")
        unit.exact(at + "dequant", jax.jit(fmt.fake_quant)(x).astype(jnp.float32))


def _code_tables(unit: Unit) -> None:
    codes = jnp.arange(256, dtype=jnp.uint32)
    for key, values in (
        ("e4m3_table_u8_to_f32", minifloat.E4M3.decode(codes)),
        ("e8m0_table_u8_to_f32", minifloat.ue8m0_decode(codes)),
        ("e2m1_table", minifloat.E2M1.decode(codes[:16])),
    ):
        if key in unit.arrays:
            unit.exact(key, values)
    if "cast/bf16_all_x" in unit.arrays:
        x = jnp.asarray(unit["cast/bf16_all_x"])
        unit.exact("cast/e4m3_of_clamped", minifloat.E4M3.encode(x))
        unit.exact("cast/e2m1_codes_of_clamped", minifloat.E2M1.encode(x))


def _sparse_attention(unit: Unit) -> None:
    for match in unit.names(r"sparse_attn/(f32|bf16)/o"):
        q, kv, index = (unit[f"sparse_attn/{name}"] for name in ("q", "kv", "idx"))
        batch, rows = index.shape[:2]
        keys = dataclasses.replace(float_rows(jnp.asarray(kv)), seq=jnp.repeat(jnp.arange(batch), rows))
        row_set = RowSet(keys, jnp.asarray(index.reshape(batch * rows, -1)))
        x = jnp.asarray(q.reshape(batch * rows, *q.shape[2:]), jnp.bfloat16 if match[1] == "bf16" else jnp.float32)
        sink, scale = jnp.asarray(unit["sparse_attn/sink"]), float(unit["sparse_attn/scale"])
        out = sparse_mla(x, [row_set], sink, scale=scale)
        (unit.ulp if match[1] == "bf16" else unit.close)(match[0], out.reshape(q.shape))


def _hyper_connections(unit: Unit) -> None:
    for match in unit.names(r"sinkhorn/(iters(\d+)|hc(\d+))/pre"):
        at = match[0].removesuffix("pre")
        streams = unit.arrays[match[0]].shape[-1]
        own = f"{at}mixes" in unit.arrays
        mixes, base = unit[f"{at}mixes" if own else "sinkhorn/mixes"], unit["sinkhorn/base"]
        iters = int(match[2]) if match[2] else 20
        mix = hyper_connections.split_mixes(
            mixes, base[: mixes.shape[-1]], unit["sinkhorn/scale"], hc=streams, eps=HC_EPS, iters=iters
        )
        for name in ("pre", "post", "comb"):
            unit.close(at + name, getattr(mix, name))
    if "hc/x" in unit.arrays:
        streams, pre = unit["hc/x"], unit["hc/pre_mix"]
        unit.close("hc/collapsed", hyper_connections.collapse(streams, pre))
        mix = hyper_connections.Mix(pre, unit["hc/post"], unit["hc/comb"])
        unit.close("hc/expanded", hyper_connections.expand(streams, unit["hc/sub_out"], mix))


def _candidates(unit: Unit) -> None:
    for match in unit.names(r"(cand/\d+/)blk_k"):
        at, (size, blocks) = match[1], (int(n) for n in unit[match[0]])
        for scores, visible, mask in (("logits", "lens", "mask"), ("dec_logits", "dec_len", "dec_mask")):
            values = unit[at + scores]
            flat = jnp.asarray(values.reshape(-1, values.shape[-1]))
            counts = jnp.asarray(np.broadcast_to(unit[at + visible], values.shape[:-1]).reshape(-1))
            unit.exact(at + mask, _candidate_mask(flat, counts, size, blocks).reshape(values.shape))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _candidate_mask(scores: jax.Array, visible: jax.Array, size: int, blocks: int) -> jax.Array:
    chosen = candidate_select(block_maxima(scores, size), visible, block_size=size, topk_blocks=blocks)
    return indexer.block_mask(chosen, scores.shape[-1], size)


def _rope(unit: Unit) -> None:
    def tables(args: np.ndarray, length: int):
        width, _, original, base, factor, fast, slow = args.tolist()
        scaling = RopeScaling(factor, int(original), fast, slow) if original else None
        return rope.rope_tables(int(width), length, base, scaling)

    for match in unit.names(r"(freqs/\d+/)args"):
        args = unit[match[0]]
        for name, table in zip(("cos", "sin"), tables(args, int(args[1])), strict=True):
            unit.close(match[1] + name, table, TABLE_ATOL)
    if "freqs/far/pos" in unit.arrays:
        positions = unit["freqs/far/pos"]
        far = tables(unit["freqs/1/args"], int(positions.max()) + 1)
        for name, table in zip(("cos", "sin"), far, strict=True):
            unit.close(f"freqs/far/{name}", table[positions], TABLE_ATOL)
    for match in unit.names(r"(rope/\w+/)(fwd|inv)_pos(\d+)(_bf16)?"):
        x, start = unit[match[1] + "in"], int(match[3])
        # The rotations were recorded with the second YaRN table.
        rows = [unit[f"freqs/2/{name}"][start : start + x.shape[1]] for name in ("cos", "sin")]
        cos, sin = (row.reshape(1, x.shape[1], *[1] * (x.ndim - 3), -1) for row in rows)
        x = jnp.asarray(x, jnp.bfloat16 if match[4] else jnp.float32)
        rotated = rope.apply_rope(x, cos, sin, inverse=match[2] == "inv")
        (unit.ulp if match[4] else unit.close)(match[0], rotated)


def _window_positions(unit: Unit) -> None:
    """The keys that the real step lets a row see, from a one-layer model with that window."""
    matches = unit.names(r"window_idx/(?:prefill_T|decode_p)(\d+)_w(\d+)")
    longest = bucket(max((int(match[1]) + 1 for match in matches), default=1))
    for window in sorted({int(match[2]) for match in matches}):
        cfg = _window_model(window, longest)
        params = steps.init_params(cfg)
        for match in matches:
            if int(match[2]) != window:
                continue
            golden, count, decode = unit[match[0]], int(match[1]), "decode" in match[0]
            start, rows = (count, 1) if decode else (0, count)
            step = make_step([Chunk(0, [0] * rows, start, [0])], cfg, rows=1 if decode else longest)
            _, _, captured = steps.trace_step(params, ModelCache.empty(cfg, 1, 1), step, cfg)
            if decode:
                golden = ring_positions(golden, np.asarray(count), window)
            differing = differing_rows(golden[0], np.asarray(captured[0]["window_positions"])[:rows])
            unit.verdicts.append(Verdict(match[0], "identical", differing == 0, differing))


def _window_model(window: int, longest: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=2, hidden_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32, q_lora_rank=32,
        qk_rope_head_dim=8, o_groups=1, o_lora_rank=8, moe_intermediate_size=8, n_routed_experts=1,
        num_experts_per_tok=1, sliding_window=window, compress_ratios=(0,), kv_source_layer_ids=(),
        index_source_layer_ids=(), index_n_heads=1, index_head_dim=32, index_topk=1, max_position_embeddings=longest,
        hc_mult=1,
    )  # fmt: skip


def _draft_rows(unit: Unit) -> None:
    """The keys that the draft step's rows see at position p: the window's ring slots, then the block's own rows."""
    for match in unit.names(r"dspark_idx/p(\d+)_w(\d+)_b(\d+)"):
        last, window, block = (int(group) for group in match.groups())
        at = DraftStep(*(np.array([n], np.int32) for n in (0, last + 1, 0, 0)))
        seen = np.asarray(window_positions(at, window))[0]
        slots = np.sort(seen[seen >= 0] % window)
        listed = np.concatenate([slots, window + np.arange(block)])
        unit.exact(match[0], np.broadcast_to(listed, (1, block, listed.size)))


def _norms(unit: Unit) -> None:
    for match in unit.names(r"(rmsnorm/(f32|bf16)/eps([^/]+)/)y"):
        bf16 = match[2] == "bf16"
        x = jnp.asarray(unit[match[1] + "x"], jnp.bfloat16 if bf16 else jnp.float32)
        y = norms.rms_norm(x, jnp.asarray(unit[match[1] + "w"]), float(match[3]))
        (unit.ulp if bf16 else unit.close)(match[0], y)


def _gate(unit: Unit) -> None:
    for match in unit.names(r"(gate/([a-z]+)_k(\d+)_norm([01])/)weights"):
        x, weight, bias = (jnp.asarray(unit[f"gate/{name}"]) for name in ("x", "weight", "bias"))
        weights, experts = moe.route(
            x, weight, bias, k=int(match[3]), scoring_func=match[2], temp=GATE_TEMP, normalise=match[4] == "1",
            scale=GATE_SCALE,
        )  # fmt: skip
        unit.exact(match[1] + "indices", experts)
        unit.close(match[0], weights)


def _expert(unit: Unit) -> None:
    if "expert/x" not in unit.arrays:
        return
    x, w1, w2, w3 = (jnp.asarray(unit[f"expert/{name}"]) for name in ("x", "w1", "w2", "w3"))
    limit = float(unit["expert/limit"])
    unit.close("expert/y", moe.expert(x, w1, w2, w3, limit))
    unit.close("expert/y_weighted", moe.expert(x, w1, w2, w3, limit, jnp.asarray(unit["expert/route_w"][:, 0])))


def _compressor(unit: Unit) -> None:
    for match in unit.names(r"(compressor/r(\d+)/)prefill_T(\d+)"):
        at, ratio, prompt = match[1], int(match[2]), int(match[3])
        x, wkv, weight = (jnp.asarray(unit[at + name]) for name in ("x", "w/wkv.weight", "w/norm.weight"))
        count = x.shape[1] // ratio
        groups = x[:, : count * ratio].reshape(x.shape[0], count, ratio, -1)
        if ratio == 1:
            latent = linear(groups[:, :, 0], wkv)
        else:
            gate = linear_f32(groups, jnp.asarray(unit[at + "w/wgate.weight"]))
            latent = pool(linear_f32(groups, wkv), gate).astype(x.dtype)
        latent = norms.rms_norm(latent, weight, NORM_EPS)
        complete = np.asarray(compressor.visible_entries(np.arange(x.shape[1]), ratio))
        unit.close(match[0], latent[:, : complete[prompt - 1]])
        # Decode emits an entry on the step that makes it visible.
        emits = np.flatnonzero(np.diff(complete, prepend=0))
        emits = emits[emits >= prompt]
        unit.exact(at + "decode_pos", emits)
        unit.close(at + "decode", latent[:, complete[emits] - 1])


def _packed_products(unit: Unit) -> None:
    """Codes and scales of the rounded input, products with both kinds of packed weight, and the unpacked weights."""
    fmt, kinds = get_format(QUANTISERS["act_quant_b32_ue8m0"]), {"fp8": "w_fp8_codes", "fp4": "w_fp4_packed"}
    if "gemm/w_fp8_codes" not in unit.arrays:
        return
    weights = {
        kind: packed.PackedWeight(jnp.asarray(unit[f"gemm/{codes}"]), jnp.asarray(unit[f"gemm/w_{kind}_scale"]), kind)
        for kind, codes in kinds.items()
    }
    for kind, weight in weights.items():
        unit.exact(f"gemm/w_{kind}_dequant", jax.jit(packed.unpack_weight)(weight))
    for match in unit.names(r"(gemm/(f32|bf16)/)x"):
        golden_x, bf16 = unit[match[0]], match[2] == "bf16"
        x = jnp.asarray(golden_x, jnp.bfloat16 if bf16 else jnp.float32)
        row = np.asarray(jax.jit(fmt.pack)(x))
        unit.exact(match[1] + "x_codes", row[:, : x.shape[-1]])
        unit.exact(match[1] + "x_scale", row[:, x.shape[-1] :])
        for kind, weight in weights.items():
            (unit.ulp if bf16 else unit.close)(f"{match[1]}{kind}_out", jax.jit(linear)(x, weight))


PARTS: dict[str, tuple[Callable[[Unit], None], ...]] = {
    "units_quant": (_quantisers, _code_tables),
    "units_ops": (
        _sparse_attention, _hyper_connections, _candidates, _rope, _window_positions, _draft_rows, _norms, _gate,
        _expert, _compressor, _packed_products,
    ),
    "units_engram": (judge_token_map, judge_constants, judge_rows),
}  # fmt: skip
