"""The role of every layer, derived once from the configuration (report §2.3.1, Fig. 4; docs/contract.md)."""

from __future__ import annotations

import dataclasses
import functools

from dsflash_jax.config import ModelConfig

SWA, FULL, REINDEX, REUSE = "SWA", "Full", "Reindex", "Reuse"


@dataclasses.dataclass(frozen=True)
class LayerRole:
    """Orthogonal facts of one layer. `kv_source` and `index_source` are layer numbers, None in an SWA layer."""

    layer: int
    ratio: int
    owns_kv: bool
    indexes: bool
    builds_candidates: bool
    reads_candidates: bool
    kv_source: int | None
    index_source: int | None
    rope: str  # "swa" | "compressed": which of the two RoPE tables everything in the layer uses
    side: str  # "encoder" | "decoder": the decoder starts at the last KV source

    @property
    def label(self) -> str:
        """SWA, Full (owns KV, fresh top-k), Reindex (fresh top-k on older KV) or Reuse."""
        if self.ratio == 0:
            return SWA
        if self.owns_kv:
            return FULL
        return REINDEX if self.indexes else REUSE


def decoder_start(cfg: ModelConfig) -> int:
    """First decoder layer: the last KV source. Without any KV source every layer is an encoder layer."""
    return max(cfg.kv_source_layer_ids, default=cfg.num_hidden_layers)


@functools.lru_cache(maxsize=64)
def layer_roles(cfg: ModelConfig) -> tuple[LayerRole, ...]:
    """One `LayerRole` per backbone layer."""
    roles = []
    kv_source = index_source = None
    first = decoder_start(cfg)
    candidates = cfg.candidate_source_layer_id
    for layer, ratio in enumerate(cfg.layer_ratios):
        owns, indexes = layer in cfg.kv_source_layer_ids, layer in cfg.index_source_layer_ids
        kv_source = layer if owns else kv_source
        index_source = layer if indexes else index_source
        roles.append(
            LayerRole(
                layer=layer,
                ratio=ratio,
                owns_kv=owns,
                indexes=indexes,
                builds_candidates=indexes and layer == candidates,
                reads_candidates=indexes and 0 <= candidates < layer,
                kv_source=kv_source if ratio else None,
                index_source=index_source if ratio else None,
                rope="compressed" if ratio else "swa",
                side="decoder" if layer >= first else "encoder",
            )
        )
    return tuple(roles)


def kv_owners(cfg: ModelConfig) -> tuple[LayerRole, ...]:
    """The layers that own global KV, ascending."""
    return tuple(role for role in layer_roles(cfg) if role.owns_kv)


def roles_table(cfg: ModelConfig) -> list[dict[str, object]]:
    """Rows for printing: every fact of every layer, in layer order."""
    return [{**dataclasses.asdict(role), "label": role.label} for role in layer_roles(cfg)]
