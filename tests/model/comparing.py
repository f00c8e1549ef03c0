"""The one rule by which two runs over the same tokens count as the same run.

Where all stored codes agree: selections and candidates identical, logits within 1e-5. Where a stored code differs, it
must be by one step, its unrounded input must lie within 1e-6 of a rounding boundary (relative to the largest value of
the group that shares a scale, which is what float32 sums are exact to), and logits agree within 1e-3; such flips may be
at most 1 in 1,000 of all codes compared in a test. Anything else fails.
"""

import dataclasses

import jax
import numpy as np

from dsflash_jax import steps
from dsflash_jax.cache.layout import cache_layout
from dsflash_jax.numerics.formats import Float32Scale, KVFormat, get_format
from dsflash_jax.roles import layer_roles
from tests.oracles.compressor import pool_group
from tests.oracles.rope import rotate

EQUAL_CODES_ATOL = 1e-5
FLIPPED_ATOL = 1e-3
BOUNDARY = 1e-6
FLIPS_PER_CODE = 1e-3
# Stored float32 values carry no rounding boundary: they agree to the rounding of sums of a few dozen terms.
FLOAT_RTOL = 2e-6
DISCRETE = ("selection", "candidates")


@dataclasses.dataclass
class Tally:
    """Stored codes compared so far, and how many differed."""

    codes: int = 0
    flips: int = 0

    def check(self) -> None:
        """Fails when more than 1 in 1,000 codes differed."""
        assert self.flips <= self.codes * FLIPS_PER_CODE, f"{self.flips} of {self.codes} stored codes differ"


def assert_same_run(model, whole, parts, tally: Tally | None = None, flipped: int = 0) -> int:
    """Fails unless both (run, stored rows) pairs agree by the rule above; returns the number of codes that differ.

    model: (cfg, params). tally: collects the codes of several comparisons, whose caller checks it at the end; without
    one the limit holds for this comparison alone. flipped: codes that differed earlier in these runs, in rows no longer
    stored.
    """
    if tally is None:
        tally = Tally()
        flips = assert_same_run(model, whole, parts, tally, flipped)
        tally.check()
        return flips
    run, other = whole[0], parts[0]
    assert run.length == other.length, f"{run.length} positions against {other.length}"
    flips = count_flips(model[0], whole[1], parts[1], lambda kind, layer: unrounded(*model, run, kind, layer), tally)
    if not flips + flipped:
        assert_same_discrete(run, other)
    assert_close_logits(run.logits, other.logits, FLIPPED_ATOL if flips + flipped else EQUAL_CODES_ATOL)
    return flips


def assert_close_logits(logits, others, atol=EQUAL_CODES_ATOL) -> None:
    """Finite, and every logit within `atol`."""
    logits, others = np.stack(logits), np.stack(others)
    assert np.isfinite(logits).all() and np.isfinite(others).all(), "logits must be finite"
    worst = np.abs(logits - others).max()
    assert worst <= atol, f"logits differ by {worst:.3g}, at most {atol:g} allowed"


def assert_same_discrete(run, other) -> None:
    """Selections and candidate blocks of every layer and position are identical."""
    for layer, name in run.layers:
        if name in DISCRETE and (layer, name) in other.layers:
            mine, theirs = run.stack(layer, name), other.stack(layer, name)
            assert np.array_equal(mine, theirs), f"layer {layer} {name}:\n{mine}\nagainst\n{theirs}"


def count_flips(cfg, stored: dict, other: dict, inputs, tally: Tally | None = None) -> int:
    """Stored codes that differ; fails for a difference that the rule does not allow.

    inputs: (kind, layer) -> unrounded float32[rows, D] of the last rows stored, called only where bytes differ.
    """
    assert stored.keys() == other.keys()
    layout, flips, codes = cache_layout(cfg), 0, 0
    formats = {(m.kind, m.layer): (m.format, m.width) for m in layout.members + layout.ring}
    for key, rows in stored.items():
        theirs = other[key]
        assert rows.shape == theirs.shape, f"{key}: {rows.shape} rows against {theirs.shape}"
        if key[0] == "open":
            assert_floats(key, rows, theirs)
            continue
        fmt, width = formats[key]
        codes += rows.shape[0] * width
        if not np.array_equal(rows, theirs):
            flips += _flips_of(key, fmt, width, rows, theirs, inputs)
    if tally is not None:
        tally.codes, tally.flips = tally.codes + codes, tally.flips + flips
    return flips


def assert_floats(key, rows: np.ndarray, theirs: np.ndarray) -> None:
    """Float rows agree to a few units in the last place of the row's largest value."""
    if rows.size:
        limit = FLOAT_RTOL * np.abs(rows).max(axis=-1, keepdims=True)
        apart = np.abs(rows - theirs)
        assert (apart <= limit).all(), f"{key}: stored floats differ by {apart.max():.3g}"


def _flips_of(key, fmt: KVFormat, width: int, rows: np.ndarray, theirs: np.ndarray, inputs) -> int:
    if fmt == get_format("fp32"):
        assert_floats(key, rows.view(np.float32), theirs.view(np.float32))
        return 0
    (mine, scales), (yours, other_scales) = split_codes(fmt, width, rows), split_codes(fmt, width, theirs)
    if isinstance(fmt.scale, Float32Scale):
        assert_floats(key, scales.view(np.float32), other_scales.view(np.float32))
    elif not np.array_equal(scales, other_scales):
        raise AssertionError(f"{key}: scales differ at {np.argwhere(scales != other_scales)[:4].tolist()}")
    apart = np.abs(mine - yours)
    assert apart.max() <= 1, f"{key}: codes differ by {apart.max()} steps"
    x = np.asarray(inputs(*key), np.float32)[-len(rows) :]
    margin = BOUNDARY * np.repeat(np.abs(x.reshape(len(x), -1, fmt.group or width)).max(axis=-1), fmt.group or width, 1)
    moved = [split_codes(fmt, width, np.asarray(_pack(fmt, values)))[0] for values in (x - margin, x, x + margin)]
    reachable = (yours >= np.minimum.reduce(moved)) & (yours <= np.maximum.reduce(moved))
    bad = np.argwhere(~reachable)[:4].tolist()
    assert not bad, f"{key}: a code differs although its input is no rounding boundary, at {bad}"
    return int(apart.sum())


_pack = jax.jit(lambda fmt, x: fmt.pack(x), static_argnums=0)


def split_codes(fmt: KVFormat, width: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows as (element codes int64[rows, width], ordered like the values they stand for, and scale bytes)."""
    bits = fmt.element.bits
    cut = width * bits // 8
    data, scales = rows[:, :cut], np.ascontiguousarray(rows[:, cut:])
    if bits == 4:
        raw = np.stack([data & 15, data >> 4], axis=-1).reshape(len(rows), width).astype(np.int64)
    else:
        raw = np.ascontiguousarray(data).view({8: np.uint8, 16: np.uint16}[bits]).astype(np.int64)
    sign = raw >> (bits - 1)
    return np.where(sign, -1 - (raw & ~(1 << bits - 1)), raw), scales


def unrounded(cfg, params, run, kind: str, layer: int) -> np.ndarray:
    """What a run packed: float32[rows, D] of window rows by position or of entries, from its attention input.

    Uses the model's own projections and norms, but the oracle's pooling and rotation and none of the cache code.
    """
    attn, role = steps.bind(params, cfg).layers[layer].attn, layer_roles(cfg)[layer]
    cos, sin = (np.asarray(params["freqs"][role.rope][part]) for part in ("cos", "sin"))
    x = run.stack(layer, "attn_in")
    if kind == "window":
        latents = np.asarray(jax.jit(attn.window_latent)(x))
        return np.stack([rotate(row, cos[t], sin[t]) for t, row in enumerate(latents)])
    first = np.arange(0, len(x) - len(x) % role.ratio, role.ratio)
    kv = np.asarray(attn.compressor.wkv.f32(x))
    if role.ratio > 1:
        gate = np.asarray(attn.compressor.wgate.f32(x))
        kv = np.stack([pool_group(kv[f : f + role.ratio], gate[f : f + role.ratio]) for f in first])
    latent = attn.compressor.norm(kv)
    rows = np.asarray(jax.jit(attn.indexer.key)(latent) if kind == "index" else latent)
    return np.stack([rotate(row, cos[f], sin[f]) for row, f in zip(rows, first, strict=True)])
