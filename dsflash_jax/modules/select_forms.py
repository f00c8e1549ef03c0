"""What both ways of selecting share: the indexer's queries, tiles of query rows, and the forms of a selection."""

from __future__ import annotations

from typing import NamedTuple

import jax

from dsflash_jax.cache.layout import Member, cache_layout
from dsflash_jax.config import ModelConfig
from dsflash_jax.modules.step_index import Tiles
from dsflash_jax.roles import LayerRole
from dsflash_jax.types import GLOBAL_GROUP, StepInfo
from pallas_kernels.sparse_mla.sources import DENSE_TILE_ROWS, unpacks_table


class Query(NamedTuple):
    """Indexer queries of a layer: q [T, H, D] (rounded like the keys) and signed weights [T, H], float32."""

    q: jax.Array
    weights: jax.Array


def table_entries(step: StepInfo, member: Member) -> int:
    """Entries a block table of this step can address, static."""
    return step.block_tables[GLOBAL_GROUP].shape[1] * member.rows_per_page


MAX_TILE_ROWS = 128  # more rows make the products no faster and read more keys that only some of the rows see
_SCORE_ARRAYS = 4  # float32 [rows, entries] alive at once: summed, masked, made canonical, ranked


def tile_rows(step: StepInfo, cfg: ModelConfig) -> int:
    """Query rows per tile: the mean rows per sequence, bounded so that one tile's scores fit the scratch budget.

    The scores of single heads do not count: `indexer_scores` makes them for a few pages at a time.
    """
    entries = max((table_entries(step, m) for m in cache_layout(cfg).members), default=1)
    share = max(1, step.num_rows // step.num_seqs)
    budget = max(1, cfg.scratch_bytes // (4 * _SCORE_ARRAYS * entries))
    return min(1 << (share - 1).bit_length(), 1 << (budget.bit_length() - 1), MAX_TILE_ROWS)


# Measured on two CPU cores: in a dense product over a whole table a key costs about 1/8 of a picked key, once a tile
# has rows enough to share it and its mask is at hand.
DENSE_KEYS_PER_PICK = 8


def reads_densely(step: StepInfo, tiles: Tiles, kv_source: int, cfg: ModelConfig) -> bool:
    """Whether the layers of a KV owner read its main rows whole, under masks, where XLA runs them; static."""
    member = cache_layout(cfg).member(kv_source, "main")
    entries = table_entries(step, member)
    table = unpacks_table(step.num_rows * cfg.index_topk, step.num_seqs * entries, member.width, cfg.scratch_bytes)
    shared = tiles.rows.shape[1] >= DENSE_TILE_ROWS and entries <= DENSE_KEYS_PER_PICK * cfg.index_topk
    return table and shared


class Forms(NamedTuple):
    """What a selection is wanted as, static. Lists always: what the platform does not read, XLA drops."""

    masks: bool  # of the selection, beside the lists
    reads_pool: bool  # Reindex layers score the keys of the candidate blocks alone; else those of the whole table
    scores: bool  # captured


def wanted_forms(step: StepInfo, tiles: Tiles, role: LayerRole, cfg: ModelConfig, capture: bool) -> Forms:
    """The forms for the index source `role`."""
    width = table_entries(step, cache_layout(cfg).member(role.kv_source, "index"))
    pool = tiles.rows.shape[1] * cfg.candidate_topk_blocks * cfg.candidate_block_size
    reads_pool = 0 < pool < width and not capture and not cfg.stale_index_keys
    return Forms(reads_densely(step, tiles, role.kv_source, cfg), reads_pool, capture)
