"""Index scores over a list of candidate blocks per query: what Reindex layers select from."""
