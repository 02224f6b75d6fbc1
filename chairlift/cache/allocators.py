"""Which blocks a layer group needs: all of them, or those that its sliding window still sees.

Arithmetic on positions only; knows no pool and no sequence. A query at position `i` of a layer with window `w`
attends to positions `i - w + 1 ... i`, so before token `n` is computed `n - w + 1 ... n - 1` must be held.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

NEVER = sys.maxsize


class CacheAllocator(Protocol):
    """What the cache asks of a layer group. `num_computed` is the position of the next token to compute."""

    def first_block(self, num_computed: int) -> int:
        """Table index of the first block that tokens from `num_computed` on see; those before it may be handed back."""
        ...

    def expires_at(self, block: int) -> int:
        """The smallest `num_computed` at which table index `block` may be handed back."""
        ...

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that one sequence holds at most while it grows to `num_tokens`, at most `chunk` tokens at a time."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionAllocator:
    """Every token sees all before it: nothing is handed back before the sequence ends."""

    page_size: int

    def first_block(self, num_computed: int) -> int:
        return 0

    def expires_at(self, block: int) -> int:
        return NEVER

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class SlidingWindowAllocator:
    """Every token sees itself and the `window - 1` before it."""

    page_size: int
    window: int

    def first_block(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1) // self.page_size

    def expires_at(self, block: int) -> int:
        return (block + 1) * self.page_size + self.window - 1

    def peak_blocks(self, num_tokens: int, chunk: int) -> int:
        seen = self.window - 1 + chunk  # consecutive positions, which may begin anywhere in a page
        return min(-(-num_tokens // self.page_size), -(-(seen - 1) // self.page_size) + 1)
