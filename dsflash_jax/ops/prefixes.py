"""Work on a prefix of a table, as the kernels' XLA paths do it; the model reaches it here."""

from pallas_kernels.common.prefixes import prefix_sizes, run_prefix

__all__ = ["prefix_sizes", "run_prefix"]
