"""Match, reserve, commit, release, swap: all that the scheduler asks of the cache.

Decides which block holds which tokens of which sequence, and what of it others may reuse. Touches no device: what must
move comes back as `BlockCopy` values, to be executed in the order of the calls, before the forward pass of the step.
Every verb either succeeds as a whole or takes nothing and says so. Knows no request, no budget and no policy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

from chairlift.cache.allocators import NEVER
from chairlift.cache.hashing import Hit, encode, root_key
from chairlift.cache.layout import CacheLayout
from chairlift.cache.pool import BlockPool
from chairlift.cache.table import NULL_BLOCK, BlockCopy, SequenceKV

WORTH_WAITING = 16  # tokens that a step's delay must save


class Match(NamedTuple):
    """What `KVCache.match` took."""

    num_tokens: int = 0  # computed already: the sequence goes on from here
    copies: tuple[BlockCopy, ...] = ()
    wait: bool = False  # nothing was taken; in the next step there is clearly more


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """A snapshot. `used + cached + free = total`, in blocks."""

    used: int
    cached: int
    free: int
    total: int
    host_used: int
    host_total: int
    hit_tokens: int  # of all admitted sequences so far
    queried_tokens: int


class _Prefix(NamedTuple):
    """`num_blocks` blocks to share, and the block of each group that the tokens after them can be copied from."""

    num_tokens: int
    num_blocks: int
    sources: list[int]


class KVCache:
    """The blocks of one model on one device, shared by all sequences."""

    def __init__(self, layout: CacheLayout, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.layout = layout
        self._page = layout.page_size
        self._allocators = layout.allocators()
        self._full_groups = [group for group, spec in enumerate(layout.groups) if spec.window is None]
        self._pool = BlockPool(num_blocks)
        self._host = BlockPool(num_host_blocks)
        self._version = 0
        self._hit_tokens = 0
        self._queried_tokens = 0

    # Questions

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can take."""
        return self._pool.num_available

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(
            used=self._pool.num_used,
            cached=self._pool.num_cached,
            free=self._pool.num_free,
            total=self._pool.num_blocks,
            host_used=self._host.num_used,
            host_total=self._host.num_blocks,
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
        )

    def block_states(self) -> bytes:
        """One byte per block; see `BlockPool.states`."""
        return self._pool.states()

    def blocks_missing(self, kv: SequenceKV, upto: int) -> int:
        """Blocks that `reserve(kv, ..., upto)` would take, before what sliding hands back."""
        return self._num_missing(kv.tables, upto)

    # Verbs

    def new(self, salt: bytes) -> SequenceKV:
        """The record of a new sequence. Sequences share blocks only with those of the same salt."""
        num_groups = len(self.layout.groups)
        return SequenceKV(
            salt=salt,
            version=self._version,
            root=root_key(salt, self._version),
            tables=[[] for _ in range(num_groups)],
            first=[0] * num_groups,
        )

    def match(self, kv: SequenceKV, tokens: Sequence[int], step: int) -> Match:
        """Take the longest cached beginning of `tokens`, but never the last token.

        Full blocks are shared; what follows them is copied from the cached block that has most in common. `kv` must
        hold nothing. `step` is the step being planned; it never goes back.
        """
        if kv.tables[0] or kv.is_swapped_out:
            raise ValueError("match needs a sequence that holds no blocks: release it first")
        if kv.version != self._version:
            kv.version, kv.root = self._version, root_key(kv.salt, self._version)
            kv.keys.clear()
        self._pool.index.begin(step)
        cached = self._find_blocks(kv, tokens)
        prefix, promised = self._longest_prefix(kv, tokens, cached)
        if promised - prefix.num_tokens >= WORTH_WAITING:
            return Match(wait=True)
        copies = self._take(kv, cached, prefix)
        if copies is None:  # no room for a copy beside its source
            prefix, _ = self._longest_prefix(kv, tokens, cached, may_copy=False)
            copies = self._take(kv, cached, prefix) or ()
        kv.num_queried, kv.num_hit = len(tokens), prefix.num_tokens
        kv.commit_at = 0
        return Match(prefix.num_tokens, copies)

    def reserve(self, kv: SequenceKV, num_computed: int, upto: int) -> bool:
        """Make room for `tokens[:upto]`, of which `num_computed` have been computed.

        Sliding groups first hand back what no token from `num_computed` on can see. False: too few blocks available;
        none was taken.
        """
        if upto <= kv.capacity and num_computed < kv.slide_at:
            return True
        self._slide(kv, num_computed)
        blocks = self._pool.allocate(self._num_missing(kv.tables, upto))
        if blocks is None:
            return False
        for group, table in enumerate(kv.tables):
            table += blocks[group :: len(kv.tables)]
        self._set_marks(kv)
        return True

    def commit(self, kv: SequenceKV, tokens: Sequence[int], upto: int, step: int, tail: bool = False) -> None:
        """Let others find `tokens[:upto]`, all computed in steps up to `step`.

        Offers the full blocks, and the last, partial one if `tail`. Does nothing while the sequence holds no blocks, or
        when the weights have changed since it was matched.
        """
        if upto < kv.commit_at and not tail:
            return
        if not kv.tables[0]:
            return
        self._queried_tokens += kv.num_queried
        self._hit_tokens += kv.num_hit
        kv.num_queried = kv.num_hit = 0
        if kv.version != self._version:
            kv.commit_at = NEVER
            return
        self._pool.index.begin(step)
        num_full = upto // self._page
        for index in range(kv.num_registered, num_full):
            self._register(kv, index, *kv.name_block(tokens, index, self._page))
        kv.num_registered = num_full
        kv.commit_at = (num_full + 1) * self._page
        if tail and upto % self._page:
            self._register(kv, num_full, kv.parent_key(num_full), encode(tokens[num_full * self._page : upto]))

    def release(self, kv: SequenceKV, keep: bool = True) -> None:
        """Hand everything back, in host memory too; the sequence can start again from nothing.

        With `keep=False` nobody can match what only this sequence referenced.
        """
        self._pool.release(_tail_first(kv.tables), keep)
        self._host.release(_tail_first(kv.host_tables))
        kv.host_tables = []
        self._empty(kv)

    def swap_out(self, kv: SequenceKV) -> tuple[BlockCopy, ...] | None:
        """Move the sequence to host memory and hand its blocks back. None: too little host memory, nothing moved."""
        targets = self._host.allocate(_num_held(kv.tables))
        if targets is None:
            return None
        host_tables = _refill(kv.tables, targets)
        copies = self._copy_all("swap_out", kv.tables, host_tables)
        self._pool.release(_tail_first(kv.tables))
        self._empty(kv)
        kv.host_tables = host_tables
        return copies

    def swap_in(self, kv: SequenceKV, num_computed: int, upto: int) -> tuple[BlockCopy, ...] | None:
        """Move a swapped-out sequence back to the device and make room as `reserve` does.

        None: too few blocks available; none was taken, and the sequence is still swapped out.
        """
        host_tables = kv.host_tables
        for allocator, table in zip(self._allocators, host_tables, strict=True):
            _hand_back(table, _num_null(table), allocator.first_block(num_computed), self._host)
        num_held = _num_held(host_tables)
        if num_held + self._num_missing(host_tables, upto) > self._pool.num_available:
            return None
        tables = _refill(host_tables, self._pool.allocate(num_held) or [])
        copies = self._copy_all("swap_in", host_tables, tables)
        self._host.release(_tail_first(host_tables))
        kv.host_tables = []
        self._fill(kv, tables)
        self.reserve(kv, num_computed, upto)
        return copies

    def forget(self) -> None:
        """After the weights changed: nothing computed before can be matched. Sequences that hold blocks keep them."""
        self._version += 1
        self._pool.forget()

    def check(self, live: Iterable[SequenceKV] | None = None) -> None:
        """Raise `AssertionError` on a broken invariant; with all `live` sequences, also if a reference is lost."""
        self._pool.check()
        self._host.check()
        if live is None:
            return
        sequences = list(live)
        for pool, held in (
            (self._pool, [table for kv in sequences for table in kv.tables]),
            (self._host, [table for kv in sequences for table in kv.host_tables]),
        ):
            references = [0] * (pool.num_blocks + 1)
            for block in (block for table in held for block in table if block != NULL_BLOCK):
                references[block] += 1
            assert all(references[block] == pool.num_references(block) for block in range(1, pool.num_blocks + 1))
        for kv in sequences:
            assert len({len(table) for table in kv.tables}) == 1, "the tables of a sequence differ in length"
            for first, table in zip(kv.first, kv.tables, strict=True):
                assert [block == NULL_BLOCK for block in table] == [index < first for index in range(len(table))]

    # Matching

    def _find_blocks(self, kv: SequenceKV, tokens: Sequence[int]) -> list[list[int]]:
        """[group][index]: blocks that hold the full pages of `tokens`, up to where a full-attention group has none.

        A sliding group may miss some: NULL_BLOCK.
        """
        cached: list[list[int]] = [[] for _ in kv.tables]
        for index in range((len(tokens) - 1) // self._page):
            parent, content = kv.name_block(tokens, index, self._page)
            blocks = [self._pool.index.find((group, parent), content) for group in range(len(cached))]
            if any(blocks[group] == NULL_BLOCK for group in self._full_groups):
                break
            for group, block in enumerate(blocks):
                cached[group].append(block)
        return cached

    def _longest_prefix(
        self, kv: SequenceKV, tokens: Sequence[int], cached: list[list[int]], may_copy: bool = True
    ) -> tuple[_Prefix, int]:
        """The longest prefix that every group can serve, and its length if fresh blocks could be copied too.

        One more shared block is never worth less than a longer copy, so the first number of blocks that works is best.
        """
        starts = [_run_starts(blocks) for blocks in cached]
        promised = 0
        for num_blocks in range(len(cached[0]), -1, -1):
            begin = num_blocks * self._page
            room = min(self._page, len(tokens) - 1 - begin) if may_copy else 0
            if not self._usable(starts, num_blocks, begin + room):
                continue
            hits = self._find_children(kv, num_blocks, encode(tokens[begin : begin + room]))
            ready = min(hit.num_tokens for hit, _ in hits)
            ever = min(max(hit.num_tokens, fresh.num_tokens) for hit, fresh in hits)
            if self._usable(starts, num_blocks, begin + ever):
                promised = max(promised, begin + ever)
            if self._usable(starts, num_blocks, begin + ready):
                return _Prefix(begin + ready, num_blocks, [hit.block for hit, _ in hits]), promised
        raise AssertionError("an empty prefix is always usable")

    def _usable(self, starts: list[list[int]], num_blocks: int, num_tokens: int) -> bool:
        """Whether, of the first `num_blocks` blocks, every group has those that are seen after `num_tokens` tokens."""
        return all(
            start[num_blocks] <= allocator.first_block(num_tokens)
            for start, allocator in zip(starts, self._allocators, strict=True)
        )

    def _find_children(self, kv: SequenceKV, index: int, content: bytes) -> list[tuple[Hit, Hit]]:
        """Per group, the ready and the fresh block in place `index` that have most in common with `content`."""
        parent = kv.parent_key(index)
        return [self._pool.index.longest((group, parent), content) for group in range(len(kv.tables))]

    def _take(self, kv: SequenceKV, cached: list[list[int]], prefix: _Prefix) -> tuple[BlockCopy, ...] | None:
        """Fill the tables with a prefix. None: no blocks to copy into, nothing taken."""
        num_tokens, num_blocks, sources = prefix
        num_copied = num_tokens - num_blocks * self._page
        firsts = [min(allocator.first_block(num_tokens), num_blocks) for allocator in self._allocators]
        tables = [[NULL_BLOCK] * first + blocks[first:num_blocks] for first, blocks in zip(firsts, cached, strict=True)]
        shared = _tail_first(tables)
        pinned = sources if num_copied else []  # so that making room does not evict them
        for block in [*pinned, *shared]:
            self._pool.acquire(block)
        targets = self._pool.allocate(len(pinned))
        self._pool.release(pinned)
        if targets is None:
            self._pool.release(shared)
            return None
        for table, target in zip(tables, targets, strict=False):
            table.append(target)
        self._fill(kv, tables)
        kv.num_registered = num_blocks
        return tuple(
            BlockCopy("copy", source, target, num_copied) for source, target in zip(pinned, targets, strict=True)
        )

    # Moving

    def _register(self, kv: SequenceKV, index: int, parent: bytes, content: bytes) -> None:
        for group, table in enumerate(kv.tables):
            if table[index] != NULL_BLOCK:
                self._pool.index.add(table[index], (group, parent), content)

    def _slide(self, kv: SequenceKV, num_computed: int) -> None:
        if num_computed < kv.slide_at:
            return
        for group, (allocator, table) in enumerate(zip(self._allocators, kv.tables, strict=True)):
            kv.first[group] = _hand_back(table, kv.first[group], allocator.first_block(num_computed), self._pool)
        self._set_marks(kv)

    def _num_missing(self, tables: list[list[int]], upto: int) -> int:
        return max(0, -(-upto // self._page) - len(tables[0])) * len(tables)

    def _copy_all(
        self, kind: Literal["swap_out", "swap_in"], sources: list[list[int]], targets: list[list[int]]
    ) -> tuple[BlockCopy, ...]:
        pairs = zip(chain(*sources), chain(*targets), strict=True)
        return tuple(BlockCopy(kind, source, target, self._page) for source, target in pairs if source != NULL_BLOCK)

    def _fill(self, kv: SequenceKV, tables: list[list[int]]) -> None:
        """Give a sequence that holds nothing its tables."""
        kv.tables = tables
        kv.first = [_num_null(table) for table in tables]
        self._set_marks(kv)

    def _empty(self, kv: SequenceKV) -> None:
        kv.tables = [[] for _ in kv.tables]
        kv.first = [0] * len(kv.first)
        kv.num_registered = kv.num_queried = kv.num_hit = kv.capacity = 0
        kv.slide_at = kv.commit_at = NEVER

    def _set_marks(self, kv: SequenceKV) -> None:
        """When `reserve` and `commit` have something to do: between these marks they only compare."""
        kv.capacity = len(kv.tables[0]) * self._page
        kv.slide_at = min(
            allocator.expires_at(first) for allocator, first in zip(self._allocators, kv.first, strict=True)
        )
        if kv.commit_at == NEVER and kv.version == self._version:
            kv.commit_at = (kv.num_registered + 1) * self._page


def _run_starts(blocks: list[int]) -> list[int]:
    """[n]: the smallest index from which on `blocks[:n]` has no NULL_BLOCK."""
    starts = [0]
    for index, block in enumerate(blocks):
        starts.append(starts[-1] if block != NULL_BLOCK else index + 1)
    return starts


def _tail_first(tables: list[list[int]]) -> list[int]:
    """The blocks of tables of one length, last positions first."""
    rows = zip(*(reversed(table) for table in tables), strict=True)
    return [block for row in rows for block in row if block != NULL_BLOCK]


def _num_null(table: list[int]) -> int:
    """Entries that were handed back: all before the first block still held."""
    return next((index for index, block in enumerate(table) if block != NULL_BLOCK), len(table))


def _num_held(tables: list[list[int]]) -> int:
    return sum(len(table) - _num_null(table) for table in tables)


def _hand_back(table: list[int], first: int, end: int, pool: BlockPool) -> int:
    """Release `table[first:end]`, and return where the table begins now."""
    if first >= end:
        return first
    pool.release(reversed(table[first:end]))
    table[first:end] = [NULL_BLOCK] * (end - first)
    return end


def _refill(tables: list[list[int]], blocks: list[int]) -> list[list[int]]:
    """The same tables with other blocks."""
    supply = iter(blocks)
    return [[NULL_BLOCK if block == NULL_BLOCK else next(supply) for block in table] for table in tables]
