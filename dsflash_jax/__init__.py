"""DeepSeek-V4.1-Flash's attention, caches and training in JAX.

The names below are the way in for Python. Each is imported when it is first asked for: `import dsflash_jax` imports
nothing heavy, no JAX either.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {  # public name -> module
    "ModelConfig": "config",
    "StepInfo": "types",
    "ModelCache": "cache.model_cache",
    "PagePool": "cache.pages",
    "Chunk": "batch",
    "make_step": "batch",
    "init_params": "steps",
    "forward": "steps",
    "prefill": "steps",
    "decode": "steps",
    "verify": "steps",
    "commit": "steps",
    "Session": "session",
    "NgramHash": "ops.ngram_hash",
    "stand_in_hash": "ops.ngram_hash",
    "build_token_map": "ops.token_map",
    "HostTables": "host_tables",
    "Sampling": "sampling",
    "generate_tokens": "generate",
    "load_checkpoint": "weights.load",
    "export_checkpoint": "weights.export",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
