"""Ahead-of-time compilation of every kernel to machine code, without a GPU: `python -m pallas_kernels.aot`.

Needs JAX 0.11, its CUDA 13 plugin and compiler wheels (the `aot` extra); no driver, no NVIDIA libraries.
"""
