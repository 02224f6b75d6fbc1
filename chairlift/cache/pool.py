"""Who references which block, which are free, which are worth keeping, and in what order they go.

Each block is free, referenced, or cached: unreferenced, but findable by its content. Knows no sequence and no table.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, repeat

from chairlift.cache.hashing import PrefixIndex

_STATE_OF_REFERENCES = {0: 0, 1: 1}  # more than one: 2


class BlockPool:
    """Blocks 1 to `num_blocks`. Block 0 is never handed out: block tables hold it where a block was handed back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._refs = [0] * (num_blocks + 1)
        self._freed: list[int] = []
        self._first_unused = 1  # blocks from here on were never handed out
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_blocks + 1 - self._first_unused

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def states(self) -> bytes:
        """One byte per block from block 1 on: 0 free, 1 referenced once, 2 referenced more than once, 3 cached."""
        states = bytearray(map(_STATE_OF_REFERENCES.get, islice(self._refs, 1, None), repeat(2)))
        for block in self._cached:
            states[block - 1] = 3
        return bytes(states)

    def num_references(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, n: int) -> list[int] | None:
        """Reference `n` blocks with undefined content, or none at all if fewer are available.

        Takes what was freed last, then what was never used (so that resident memory follows use), and only then evicts
        cached blocks, the least recently used first.
        """
        if n > self.num_available:
            return None
        blocks = [self._take() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        if self._first_unused <= self.num_blocks:
            self._first_unused += 1
            return self._first_unused - 1
        block, _ = self._cached.popitem(last=False)
        self.index.discard(block)
        return block

    def acquire(self, block: int) -> None:
        """Reference a block once more. It must be referenced or cached."""
        if not self._refs[block]:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int], keep: bool = True) -> None:
        """Drop one reference of each block, in the order given.

        Give the tail of a sequence first: what is released first is evicted first, and a tail is worth nothing without
        its prefix. With `keep=False` a block that nobody references any more is forgotten at once.
        """
        for block in blocks:
            if not self._refs[block]:
                raise ValueError(f"block {block} is released more often than it was referenced")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if keep and block in self.index:
                self._cached[block] = None
            else:
                self.index.discard(block)
                self._freed.append(block)

    def forget(self) -> None:
        """Nothing can be found any more; cached blocks become free."""
        self.index.clear()
        self._freed += self._cached
        self._cached.clear()

    def check(self) -> None:
        """Raise `AssertionError` if a block is lost, doubled, or found without being held."""
        free = [*self._freed, *range(self._first_unused, self.num_blocks + 1)]
        referenced = [block for block, references in enumerate(self._refs) if references]
        blocks = [*free, *referenced, *self._cached]
        assert sorted(blocks) == list(range(1, self.num_blocks + 1)), "a block is lost or in two states"
        assert all(references >= 0 for references in self._refs), "a block has fewer than no references"
        assert all(block in self.index for block in self._cached), "a cached block cannot be found"
        assert not any(block in self.index for block in free), "a free block can be found"
        self.index.check()
