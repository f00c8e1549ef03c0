"""Comparison with golden files of the released reference: `dsflash parity DIR`."""

from dsflash_jax.parity.run import run_parity

__all__ = ["run_parity"]
