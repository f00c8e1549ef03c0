"""Device caches: byte layouts, the page arena, the window ring, compressor state, and their accounting."""
