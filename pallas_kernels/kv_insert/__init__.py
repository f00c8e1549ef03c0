"""Rotation, quantisation, packing and paged scatter of new cache rows in one pass."""
