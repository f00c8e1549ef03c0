"""flax.nnx modules: they hold parameters under the released tensor names; the arithmetic is in `ops`."""
