"""Exact top-k of each row, ascending positions."""
