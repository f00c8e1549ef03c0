"""Products with packed FP8 and FP4 weights of released checkpoints, for a few rows."""
