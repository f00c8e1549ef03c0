"""GPU kernels of compressed sparse attention, each behind one function that also serves CPUs.

One folder per op: `api` (the public function), `reference` (the contract in plain jnp), `xla` (bounded memory, for CPU
and as the fallback), `pallas_triton` (the kernel), `config` (tiles), `cases` (the shapes that are compiled and timed).
Depends on jax and numpy only. docs/kernels.md says what is shown about each kernel and what is not.
"""
