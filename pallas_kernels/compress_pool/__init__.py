"""Gated pooling of m tokens into one latent, with the open group carried between steps."""
