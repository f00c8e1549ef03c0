"""Model configuration: one frozen, hashable record with the upstream config keys.

The keys are those of the released `config.json`; the keys under "project" below are ours. `validate` is called by
every constructor path, so a `ModelConfig` that exists is consistent; the rules are in `config_rules.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dsflash_jax.config_rules import check_config, refuse

_INTEGER_LISTS = (
    "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "engram_num_embeddings",
    "dspark_target_layer_ids",
)  # fmt: skip
_LATER = frozenset({
    "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_pad_token_id", "engram_compressed_vocab_size", "dspark_block_size", "dspark_target_layer_ids",
    "dspark_markov_rank", "dspark_noise_token_id", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
    "quant_method", "expert_dtype", "tie_word_embeddings", "implementation", "interpret",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters, used only in layers with a global branch (key `rope_scaling`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _floats_for_integers(self)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which implementation of the ops in `pallas_kernels` a model calls; fields are keyword arguments of the ops."""

    implementation: str | None = None  # None: the best for the platform that a step is compiled for
    interpret: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every op."""
        return {"implementation": self.implementation, "interpret": self.interpret}


BEST_KERNELS = Kernels()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and semantics of one text backbone. Field names are upstream config keys.

    Layers are zero-based. `compress_ratios[l]` is 0 for a layer with window attention only, else the number m of raw
    tokens per global entry. `swiglu_limit` 0 means no clamp. `candidate_source_layer_id` -1 means no candidate pool.

    `num_nextn_predict_layers` is the number of DSpark draft layers (released files list them in `compress_ratios` too).
    The `engram_*` keys have no effect without `engram_layer_ids`, the `dspark_*` keys none without draft layers.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    qk_rope_head_dim: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()  # rows of each layer's table
    engram_max_ngram_size: int = 1
    engram_vocab_size: int = 0  # primes of the hash functions are sought upwards from here
    engram_n_heads: int = 0  # hash functions per n-gram size
    engram_head_dim: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0  # distinct values of the compressed token map
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0  # tokens drafted at once
    dspark_target_layer_ids: tuple[int, ...] = ()  # backbone layers whose inputs the draft layers read
    dspark_markov_rank: int = 0
    dspark_noise_token_id: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    quant_method: str = ""  # "fp8": dense weights are packed E4M3 in 32x32 blocks, as released
    expert_dtype: str = ""  # "fp4": routed experts are packed E2M1 in groups of 32, as released
    tie_word_embeddings: bool = False  # the head is the embedding; checkpoints then have no head tensor
    # -- project --
    dtype: str = "float32"
    score_dtype: str = "float32"  # of index scores; "bfloat16" reproduces the released rounding
    stale_index_keys: bool = False  # reproduce the released decode quirk (golden `_raw` files only)
    page_size: int = 128  # tokens per page of the global group
    num_draft_tokens: int = 5  # sizes the rollback room of ring and compressor state
    window_format: str = "mxfp8"
    main_format: str = "fp4_e4m3"
    index_format: str = "mxfp4"
    scratch_bytes: int = 32 * 2**20  # budget of one score or gather tile
    implementation: str = ""  # of the ops in `pallas_kernels`: "" = the best for the platform, "xla", "pallas_triton"
    interpret: bool = False  # the named kernels are interpreted, on any platform: for tests, slow
    qat: bool = False  # whole-sequence forward rounds KV as the cache does, straight-through gradient
    token_shift: bool = False  # lab only: learned share of the previous embedding (not in the published model)

    def __post_init__(self) -> None:
        for name in _INTEGER_LISTS:
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                refuse(name, value, "must be a list of integers")
            object.__setattr__(self, name, tuple(value))
        _floats_for_integers(self)
        self.validate()

    @classmethod
    def from_json(cls, source: Any) -> ModelConfig:
        """Reads a config file or mapping in any accepted spelling; see `config_io.read_config`."""
        from dsflash_jax.config_io import read_config

        return read_config(source)

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compress ratios of the backbone layers (draft layers, if listed, cut off)."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def kernels(self) -> Kernels:
        """`implementation` and `interpret` as the ops take them."""
        return Kernels(self.implementation or None, self.interpret)

    def without_drafts(self) -> ModelConfig:
        """The same backbone alone."""
        return self.replace(num_nextn_predict_layers=0, dspark_target_layer_ids=(), compress_ratios=self.layer_ratios)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with fields changed (validated again)."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, every field present."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def sha256(self) -> str:
        """Hex digest of the canonical form; goes into every artefact.

        Fields that came after the first artefacts count only where they are not at their default, which is what was
        the only behaviour before: artefacts keep their names.
        """
        unset = {f.name for f in dataclasses.fields(self) if f.name in _LATER and getattr(self, f.name) == f.default}
        canonical = {k: v for k, v in self.to_dict().items() if k not in unset}
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()

    def differences(self, other: ModelConfig | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Fields in which two configs differ: name -> (here, there). A mapping may lack fields that came later."""
        mine = self.to_dict()
        theirs = other.to_dict() if isinstance(other, ModelConfig) else with_later_fields(other)
        return {k: (mine.get(k), theirs.get(k)) for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)}

    def validate(self) -> None:
        """Raises ValueError with one sentence naming field, value and rule."""
        check_config(self)


def with_later_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What an artefact keeps of a configuration (`to_dict`), with the fields that came after it at their defaults."""
    later = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name in _LATER}
    return json.loads(json.dumps(later)) | dict(stored)


def _floats_for_integers(record: Any) -> None:
    """JSON writes 16.0 as 16 in some files: equal configs must have one canonical form, hence one hash."""
    for field in dataclasses.fields(record):
        if field.type == "float" and type(getattr(record, field.name)) is int:
            object.__setattr__(record, field.name, float(getattr(record, field.name)))
