"""A host allocator of cache pages for direct use (generation, timing): which sequence holds which pages. No JAX."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping


class PagePool:
    """Hands out page numbers 0..num_pages - 1, the lowest free one first, so that equal histories give equal tables.

    A sequence is any hashable name. Not for threads; sharing of pages between sequences is the engine's business.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        """Raises ValueError for sizes below 1."""
        for name, value in (("num_pages", num_pages), ("page_tokens", page_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self._free = list(range(num_pages))  # ascending, hence a heap
        self._held: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def pages(self, sequence: Hashable) -> tuple[int, ...]:
        """The pages of a sequence in token order; () for one that holds none."""
        return tuple(self._held.get(sequence, ()))

    def reserve(self, sequence: Hashable, tokens: int) -> tuple[int, ...]:
        """Gives a sequence the pages that its first `tokens` tokens need, and returns all its pages; never shrinks.

        Raises ValueError, without having given anything, if the pool has too few free pages.
        """
        self.reserve_all({sequence: tokens})
        return self.pages(sequence)

    def reserve_all(self, lengths: Mapping[Hashable, int]) -> None:
        """As `reserve` for several sequences, name -> tokens: all of them get their pages, or none does."""
        free, needs = self.num_free, {}
        for sequence, tokens in lengths.items():
            if tokens < 0:
                raise ValueError(f"tokens={tokens} of sequence {sequence!r} must not be negative.")
            have = len(self._held.get(sequence, ()))
            needs[sequence] = need = max(0, -(-tokens // self.page_tokens) - have)
            if need > free:
                raise ValueError(
                    f"sequence {sequence!r} needs {need} more pages of {self.page_tokens} for {tokens} tokens, "
                    f"have {free} free of {self.num_pages}: release a sequence or take a larger pool."
                )
            free -= need
        for sequence, need in needs.items():
            self._held.setdefault(sequence, []).extend(heapq.heappop(self._free) for _ in range(need))

    def release(self, sequence: Hashable) -> tuple[int, ...]:
        """Takes back all pages of a sequence and returns them.

        Raises ValueError if it holds none: it was released before or never reserved.
        """
        if sequence not in self._held:
            raise ValueError(f"sequence {sequence!r} holds no pages: it was released before or never reserved any.")
        pages = self._held.pop(sequence)
        for page in pages:
            heapq.heappush(self._free, page)
        return tuple(pages)
