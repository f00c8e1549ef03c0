"""Best candidate blocks per query, the newest one pinned."""
