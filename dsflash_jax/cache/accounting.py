"""What a configuration's caches cost, derived from `layout.py`: per token, sequence and pool, and the alternatives.

A sequence of L tokens takes bytes(L) = fixed + page_bytes * ceil(L / page_tokens). Total divided by tokens therefore
changes with L and is not "bytes per token"; the report keeps the two terms apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsflash_jax.cache.layout import STATE_FORMAT, CacheLayout, Member, cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.config_rules import CACHES
from dsflash_jax.roles import layer_roles

POOL_SEQUENCES = 64  # slots of the pool that the report sizes where nobody says another number
LARGEST = 2**40  # tokens and sequences that `kv_report` accepts: beyond any machine, and every size fits a float
# One main row of V4: 448 FP8 codes, 64 rotated BF16 values, 8 scale bytes (docs/contract.md). Only its size is
# compared: no layout here stores it.
_V4_RECORD_BYTES = 448 + 64 * 2 + 8
_V4_WIDTHS = (512, 64)  # head_dim and qk_rope_head_dim that such a record belongs to
_FORMAT_ALTERNATIVES = (
    {"main": "bf16", "index": "bf16"},
    {"main": "mxfp8", "index": "mxfp4"},
    {"main": "mxfp8", "index": "fp8_fp32"},
)
_RATIO_ALTERNATIVES = ({"encoder": 1}, {"encoder": 4}, {"decoder": 2}, {"encoder": 4, "decoder": 2})


def with_formats(cfg: ModelConfig, formats: Mapping[str, str] | None) -> ModelConfig:
    """`cfg` with the formats of some caches ("main", "index", "window") replaced.

    Raises ValueError for an unknown cache or format, and for a format that does not fit the cache's width.
    """
    for cache in formats or ():
        if cache not in CACHES:
            raise ValueError(f"formats names cache {cache!r}, must be one of {', '.join(CACHES)}.")
    return cfg.replace(**{f"{cache}_format": name for cache, name in (formats or {}).items()})


def fixed_bytes(layout: CacheLayout) -> int:
    """Bytes of a sequence whatever its length: window rings and compressor state."""
    return layout.ring_bytes + layout.state_bytes


def sequence_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens: the fixed part and whole pages."""
    return fixed_bytes(layout) + layout.pages_for(tokens) * layout.page_bytes


def bytes_per_token(layout: CacheLayout) -> int | float:
    """Global bytes that one more token costs, averaged over a page; an int where it is whole."""
    return _ratio(layout.page_bytes, layout.page_tokens)


def human_size(nbytes: int) -> str:
    """59,726,888,960 as "55.62 GiB": four digits, binary units."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    step = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{nbytes / 1024**step:.4g} {units[step]}" if step else f"{nbytes} B"


def kv_report(
    cfg: ModelConfig, context: int, formats: Mapping[str, str] | None = None, sequences: int = POOL_SEQUENCES
) -> dict[str, Any]:
    """All sizes of `cfg`'s caches for sequences of `context` tokens, as plain JSON types; bytes unless a key says else.

    Args:
      cfg: the configuration; it may be one whose weights nobody has.
      context: tokens of one sequence. More than `max_position_embeddings` is allowed: sizes need no positions.
      formats: formats that replace the configuration's, as {"main": "bf16"}.
      sequences: sequence slots of the pool.

    Raises ValueError for a context or number of sequences below 1 or above LARGEST, and as `with_formats`.
    """
    for name, value in (("context", context), ("sequences", sequences)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        if value > LARGEST:
            raise ValueError(f"{name} must be at most 2^40 = {LARGEST:,}.")
    cfg = with_formats(cfg, formats)
    layout = cache_layout(cfg)
    pages = layout.pages_for(context)
    return {
        "context_tokens": context,
        "max_position_embeddings": cfg.max_position_embeddings,
        "bytes_per_token": bytes_per_token(layout),
        "page_tokens": layout.page_tokens,
        "page_bytes": layout.page_bytes,
        "pages": pages,
        "fixed_bytes": fixed_bytes(layout),
        "sequence_bytes": sequence_bytes(layout, context),
        "bytes_of_L_tokens": f"{fixed_bytes(layout):,} + {layout.page_bytes:,} x ceil(L / {layout.page_tokens})",
        "config_sha256": cfg.sha256(),
        "bytes_per_token_by_layer": list(_per_token_rows(cfg, layout)),
        "bytes_per_token_by_cache": list(_by_cache_rows(cfg, layout)),
        "fixed_bytes_per_sequence": list(_fixed_rows(cfg, layout)),
        "bytes_per_sequence_by_length": [_length_row(layout, tokens) for tokens in _lengths(layout, context)],
        "bytes_of_a_pool": list(_pool_rows(layout, pages, sequences)),
        "alternatives": list(_alternative_rows(cfg, layout, context)),
    }


def _ratio(value: int, by: int) -> int | float:
    return value // by if value % by == 0 else value / by


def _per_token(members: list[Member], layout: CacheLayout) -> int | float:
    return _ratio(sum(member.nbytes for member in members), layout.page_tokens)


def _per_token_rows(cfg: ModelConfig, layout: CacheLayout) -> Iterator[dict[str, Any]]:
    """One row per member of the page: where it lies and what it adds to a token."""
    roles = layer_roles(cfg)
    for member in layout.members:
        yield {
            "layer": member.layer,
            "side": roles[member.layer].side,
            "cache": member.kind,
            "format": member.facts.name,
            "width": member.width,
            "tokens_per_row": member.tokens_per_row,
            "row_bytes": member.row_bytes,
            "rows_per_page": member.rows_per_page,
            "page_offset": member.offset,
            "bytes_per_page": member.nbytes,
            "bytes_per_token": _per_token([member], layout),
        }


def _by_cache_rows(cfg: ModelConfig, layout: CacheLayout) -> Iterator[dict[str, Any]]:
    """Bytes per token of main and index rows, and their sum, split by the side of the owner."""
    roles = layer_roles(cfg)
    for cache in ("main", "index", "sum"):
        members = [member for member in layout.members if cache in (member.kind, "sum")]
        row: dict[str, Any] = {"cache": cache, "owners": len({member.layer for member in members})}
        for side in ("encoder", "decoder"):
            row[side] = _per_token([member for member in members if roles[member.layer].side == side], layout)
        yield {**row, "bytes_per_token": _per_token(members, layout)}


def _fixed_rows(cfg: ModelConfig, layout: CacheLayout) -> Iterator[dict[str, Any]]:
    """What a sequence slot holds whatever the length: window rings by side, draft layers by themselves, state."""
    roles = layer_roles(cfg)
    sides_of = {role.layer: role.side for role in roles}
    for side in ("encoder", "decoder", "draft"):
        rings = [ring for ring in layout.ring if sides_of.get(ring.layer, "draft") == side]
        if rings:
            yield _fixed_row(
                "window", side, rings[0].facts.name, len(rings), rings[0].rows_per_page, sum(r.nbytes for r in rings)
            )
    if layout.state_owners:
        sides = {roles[layer].side for layer in layout.state_owners}
        yield _fixed_row(
            "compressor state", " and ".join(sorted(sides, reverse=True)), STATE_FORMAT, len(layout.state_owners),
            layout.state_rows, layout.state_bytes,
        )  # fmt: skip


def _fixed_row(cache: str, side: str, fmt: str, layers: int, rows: int, total: int) -> dict[str, Any]:
    per_layer = total // layers
    return {
        "cache": cache,
        "side": side,
        "format": fmt,
        "layers": layers,
        "rows": rows,
        "row_bytes": per_layer // rows,
        "bytes_per_layer": per_layer,
        "bytes": total,
    }


def _lengths(layout: CacheLayout, context: int) -> list[int]:
    """Lengths to show: one token, one page, then sixteenfold steps up to the context."""
    steps = [1, layout.page_tokens]
    while steps[-1] * 16 < context:
        steps.append(steps[-1] * 16)
    return sorted({*(step for step in steps if step < context), context})


def _length_row(layout: CacheLayout, tokens: int) -> dict[str, Any]:
    total = sequence_bytes(layout, tokens)
    return {
        "tokens": tokens,
        "pages": layout.pages_for(tokens),
        "page_bytes": layout.pages_for(tokens) * layout.page_bytes,
        "fixed_bytes": fixed_bytes(layout),
        "total_bytes": total,
        "size": human_size(total),
        "total_over_tokens": _ratio(total, tokens),
    }


def _pool_rows(layout: CacheLayout, pages: int, sequences: int) -> Iterator[dict[str, Any]]:
    """A pool of `sequences` slots, each with the pages of a whole context: the arrays of a `ModelCache`."""
    parts = (
        ("global pages", pages * layout.page_bytes),
        ("window rings", layout.ring_bytes),
        ("compressor state", layout.state_bytes),
    )
    for part, size in (*parts, ("sum", sum(size for _, size in parts))):
        yield {
            "part": part,
            "sequences": sequences,
            "bytes_per_sequence": size,
            "bytes": size * sequences,
            "size": human_size(size * sequences),
        }


def _alternative_rows(cfg: ModelConfig, layout: CacheLayout, context: int) -> Iterator[dict[str, Any]]:
    """The same model with one thing changed; `ratio` is its bytes per token over this configuration's."""
    yield _alternative("this configuration", layout, layout, context)
    for change, changes in _changes(cfg):
        try:
            other = cache_layout(cfg.replace(**changes))
        except ValueError as error:  # a format whose groups do not divide this model's widths, a ratio not the page
            yield {"change": change, "bytes_per_token": None, "ratio": None, "sequence_bytes": None, "note": str(error)}
            continue
        yield _alternative(change, other, layout, context)
    yield from _v4_record(cfg, layout)


def _alternative(change: str, other: CacheLayout, layout: CacheLayout, context: int) -> dict[str, Any]:
    return {
        "change": change,
        "bytes_per_token": bytes_per_token(other),
        "ratio": other.page_bytes / layout.page_bytes if layout.page_bytes else None,
        "sequence_bytes": sequence_bytes(other, context),
    }


def _v4_record(cfg: ModelConfig, layout: CacheLayout) -> Iterator[dict[str, Any]]:
    """The main rows of V4 in this geometry, beside MXFP4 index keys; nothing for other widths."""
    if (cfg.head_dim, cfg.qk_rope_head_dim) != _V4_WIDTHS or not layout.members:
        return
    keys = cache_layout(cfg.replace(index_format="mxfp4")).members
    index = sum(member.nbytes for member in keys if member.kind == "index")
    page = index + sum(m.rows_per_page * _V4_RECORD_BYTES for m in layout.members if m.kind == "main")
    yield {
        "change": f"main as a V4 record of {_V4_RECORD_BYTES} B, index mxfp4",
        "bytes_per_token": _ratio(page, layout.page_tokens),
        "ratio": page / layout.page_bytes,
        "sequence_bytes": None,
        "note": "size only",
    }


def _format_name(formats: Mapping[str, str]) -> str:
    return ", ".join(f"{cache} {name}" for cache, name in formats.items())


def _changes(cfg: ModelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config fields to replace) of every alternative that differs from `cfg`."""
    if not cfg.kv_source_layer_ids:
        return
    for formats in _FORMAT_ALTERNATIVES:
        fields = {f"{cache}_format": name for cache, name in formats.items()}
        if any(getattr(cfg, field) != name for field, name in fields.items()):
            yield _format_name(formats), fields
    owners = tuple(role.layer for role in layer_roles(cfg) if role.ratio)
    # A candidate pool stores nothing, so it may go where its rule would refuse the change.
    bare = {"candidate_source_layer_id": -1}
    if owners != cfg.kv_source_layer_ids:
        yield (
            f"no sharing: all {len(owners)} global layers own KV",
            {**bare, "kv_source_layer_ids": owners, "index_source_layer_ids": owners},
        )
    for ratios, name in _other_ratios(cfg).items():
        yield name, {**bare, "compress_ratios": ratios}


def _other_ratios(cfg: ModelConfig) -> dict[tuple[int, ...], str]:
    """Compress ratios that differ from the configuration's -> how they are called."""
    roles = layer_roles(cfg)
    found: dict[tuple[int, ...], str] = {}
    for chosen in _RATIO_ALTERNATIVES:
        ratios = tuple(role.ratio and chosen.get(role.side, role.ratio) for role in roles)
        sides = [side for side in chosen if any(role.ratio and role.side == side for role in roles)]
        if ratios != cfg.layer_ratios:
            found.setdefault(ratios, ", ".join(f"{side} m = {chosen[side]}" for side in sides))
    return found
