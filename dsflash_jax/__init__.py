"""DeepSeek-V4.1-Flash's attention, caches and training in JAX. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
