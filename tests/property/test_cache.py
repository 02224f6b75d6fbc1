"""The cache against a device that stores what every position was computed from.

An entry of the model device is a hash of all tokens up to its position, so a block that is shared under a wrong prefix,
copied too early, handed out too soon or swapped to the wrong place shows as a wrong entry. The device runs a plan only
when it is launched, in the order of the plan: copies first, then all writes, then all reads.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.cache.cache import WORTH_WAITING, KVCache
from chairlift.cache.hashing import encode
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.cache.table import NULL_BLOCK, BlockCopy, SequenceKV

TOKENS = st.integers(0, 1)
CHUNKS = st.sampled_from([1, 3, 5, 9, 40])
TAILS = st.sampled_from([True, True, False])
WINDOWS = st.sampled_from([[None], [3], [None, 3], [None, 1, 8], [2, 6], [None, None, 5]])  # one layer per window


def kv_of(before: int, token: int) -> int:
    return hash((before, token))


@dataclass(eq=False)
class Sequence:
    kv: SequenceKV
    salt: int
    tokens: list[int]
    num_known: int  # the host learns sampled tokens late
    num_computed: int = 0
    entries: list[int] = field(default_factory=list)  # what the device should hold, per position
    in_plan: bool = False


@dataclass
class Row:
    sequence: Sequence
    start: int
    entries: list[int]  # of all positions up to the row's last
    tables: list[list[int]]


class CacheMachine(RuleBasedStateMachine):
    """A scheduler without judgement: it does whatever is allowed, in any order."""

    @initialize(
        windows=WINDOWS,
        page_size=st.sampled_from([1, 2, 4, 24]),
        size=st.integers(2, 12),
        host=st.sampled_from([0, 3, 40]),
    )
    def begin(self, windows: list[int | None], page_size: int, size: int, host: int) -> None:
        layers = [LayerSpec(index=i, window=w, num_kv_heads=1, head_dim=1) for i, w in enumerate(windows)]
        layout = plan_layout(layers, page_size, 1)
        self.windows = [group.window for group in layout.groups]
        self.page_size = page_size
        self.cache = KVCache(layout, size * len(self.windows) * (1 + 8 // page_size), host)
        self.blocks = [[0] * page_size for _ in range(self.cache.num_blocks + 1)]
        self.host = [[0] * page_size for _ in range(host + 1)]
        self.live: list[Sequence] = []
        self.finished: list[list[int]] = [[]]
        self.copies: list[BlockCopy] = []
        self.rows: list[Row] = []
        self.step = 0
        self.version = 0

    # What the scheduler does

    @rule(
        salt=st.sampled_from([0, 0, 1]),
        data=st.data(),
        cut=st.integers(0, 4),
        length=st.sampled_from([0, 1, 2, 7, 18]),
        bits=st.integers(0, 2**18 - 1),
        ends=st.lists(TOKENS, min_size=1, max_size=3),
    )
    def submit(self, salt: int, data: st.DataObject, cut: int, length: int, bits: int, ends: list[int]) -> None:
        """Siblings that differ in their last token, and go on where an earlier sequence was or branch off before."""
        earlier = data.draw(st.sampled_from([*self.finished[-3:], *(seq.tokens for seq in self.live)]))
        beginning = earlier[: len(earlier) - cut]
        for end in ends:
            tokens = [*beginning, *(bits >> i & 1 for i in range(length)), end]
            self.live.append(Sequence(self.cache.new(b"%d" % salt), salt, tokens, len(tokens)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=CHUNKS, tail=TAILS)
    def admit(self, data: st.DataObject, chunk: int, tail: bool) -> None:
        for seq in data.draw(st.lists(st.sampled_from(self.waiting), unique=True, min_size=1, max_size=3)):
            self.admit_one(seq, chunk, tail)

    def admit_one(self, seq: Sequence, chunk: int, tail: bool) -> None:
        longest, promised = self.longest_match(seq)
        available = self.cache.num_available
        match = self.cache.match(seq.kv, seq.tokens, self.step)
        assert match.wait == (promised - longest >= WORTH_WAITING)
        if match.wait:
            assert match.num_tokens == 0 and not match.copies and not seq.kv.tables[0]
            return
        assert match.num_tokens <= longest < len(seq.tokens)
        if available >= self.blocks_held(longest) + len(self.windows):
            assert match.num_tokens == longest
        seq.num_computed = match.num_tokens
        seq.entries = self.compute(seq, [], match.num_tokens)
        if self.plan(seq, chunk, tail):
            self.copies += match.copies
        else:
            self.give_up(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=CHUNKS, tail=TAILS, token=TOKENS, late=st.booleans())
    def go_on(self, data: st.DataObject, chunk: int, tail: bool, token: int, late: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(token)
            if not late and seq.num_known == len(seq.tokens) - 1:
                seq.num_known += 1
        self.plan(seq, chunk, tail)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.running))
        needed = sum(block != NULL_BLOCK for table in seq.kv.tables for block in table)
        room = self.cache.usage.host_total - self.cache.usage.host_used
        copies = self.cache.swap_out(seq.kv)
        assert (copies is None) == (needed > room)
        self.copies += copies or ()

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), more=st.integers(0, 5))
    def swap_in(self, data: st.DataObject, more: int) -> None:
        seq = data.draw(st.sampled_from(self.swapped))
        upto = min(seq.num_computed + more, len(seq.tokens))
        copies = self.cache.swap_in(seq.kv, seq.num_computed, upto)
        assert (copies is None) == seq.kv.is_swapped_out
        if copies is not None:
            self.copies += copies
            assert len(seq.kv.tables[0]) * self.page_size >= upto

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), tail=TAILS, keep=st.booleans())
    def finish(self, data: st.DataObject, tail: bool, keep: bool) -> None:
        seq = data.draw(st.sampled_from(self.idle))
        if tail:
            self.cache.commit(seq.kv, seq.tokens, min(seq.num_computed, seq.num_known), self.step, tail=True)
        self.cache.release(seq.kv, keep)
        self.live.remove(seq)
        self.finished.append(seq.tokens[: seq.num_known])

    @rule()
    def forget(self) -> None:
        self.cache.forget()
        self.version += 1
        assert self.cache.usage.cached == 0

    @precondition(lambda self: self.rows or self.copies)
    @rule()
    def launch(self) -> None:
        for kind, source, target, num_tokens in self.copies:
            origin = self.host if kind == "swap_in" else self.blocks
            goal = self.host if kind == "swap_out" else self.blocks
            assert source != NULL_BLOCK and target != NULL_BLOCK
            goal[target][:num_tokens] = origin[source][:num_tokens]
        for row in self.rows:
            for position in range(row.start, len(row.entries)):
                for table in row.tables:
                    block, offset = divmod(position, self.page_size)
                    assert table[block] != NULL_BLOCK
                    self.blocks[table[block]][offset] = row.entries[position]
        for row in self.rows:
            self.check_entries(row.entries, row.start, row.tables)
            row.sequence.in_plan = False
        self.copies, self.rows = [], []
        self.step += 1
        for seq in self.live:
            if seq.kv.tables[0]:
                self.check_entries(seq.entries, seq.num_computed, seq.kv.tables)
                self.cache.commit(seq.kv, seq.tokens, min(seq.num_computed, seq.num_known), self.step - 1)
            seq.num_known = len(seq.tokens)

    # What must hold

    @invariant()
    def is_consistent(self) -> None:
        self.cache.check([seq.kv for seq in self.live])
        for seq in self.live:
            capacity = len(seq.kv.tables[0]) * self.page_size
            assert capacity >= seq.num_computed or seq.kv.is_swapped_out
        usage = self.cache.usage
        assert usage.used + usage.cached + usage.free == usage.total
        assert usage.hit_tokens <= usage.queried_tokens

    def teardown(self) -> None:
        if hasattr(self, "live"):
            for seq in self.live:
                self.cache.release(seq.kv)
            self.cache.check([])
            assert self.cache.num_available == self.cache.num_blocks
            assert self.cache.usage.host_used == 0

    def check_entries(self, entries: list[int], num_computed: int, tables: list[list[int]]) -> None:
        """All that a token from `num_computed` on can see is there, and is what this sequence computed."""
        for window, table in zip(self.windows, tables, strict=True):
            first = 0 if window is None else max(0, num_computed - window + 1)
            for position in range(first, len(entries)):
                block, offset = divmod(position, self.page_size)
                assert table[block] != NULL_BLOCK, "a block inside the window was handed back"
                assert self.blocks[table[block]][offset] == entries[position]

    # The pieces

    @property
    def waiting(self) -> list[Sequence]:
        return [
            seq
            for seq in self.live
            if not seq.kv.tables[0] and not seq.kv.is_swapped_out and seq.num_known == len(seq.tokens)
        ]

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.live if seq.kv.tables[0] and not seq.in_plan]

    @property
    def swapped(self) -> list[Sequence]:
        return [seq for seq in self.live if seq.kv.is_swapped_out]

    @property
    def idle(self) -> list[Sequence]:
        return [seq for seq in self.live if not seq.in_plan]

    def plan(self, seq: Sequence, chunk: int, tail: bool) -> bool:
        """Add a row for the next tokens, if there is room for them."""
        start = seq.num_computed
        end = min(start + chunk, len(seq.tokens))
        held = [[*table] for table in seq.kv.tables]
        missing, available = self.cache.blocks_missing(seq.kv, end), self.cache.num_available
        if not self.cache.reserve(seq.kv, start, end):
            assert missing > available
            assert [len(table) for table in seq.kv.tables] == [len(table) for table in held]
            return False
        for window, table in zip(self.windows, seq.kv.tables, strict=True):
            behind = 0 if window is None else max(0, start - window + 1) // self.page_size
            assert all(block == NULL_BLOCK for block in table[:behind]), "a block behind the window is still held"
        seq.entries = self.compute(seq, seq.entries, end)
        seq.num_computed = end
        seq.in_plan = True
        self.rows.append(Row(seq, start, [*seq.entries], [[*table] for table in seq.kv.tables]))
        self.cache.commit(seq.kv, seq.tokens, min(end, seq.num_known), self.step, tail)
        return True

    def give_up(self, seq: Sequence) -> None:
        self.cache.release(seq.kv)
        seq.num_computed, seq.entries = 0, []

    def compute(self, seq: Sequence, entries: list[int], end: int) -> list[int]:
        """`entries` continued up to `end` with the weights of now; the first begins from salt and weights alone."""
        entries = [*entries]
        for position in range(len(entries), end):
            entries.append(kv_of(hash((entries[-1] if position else seq.salt, self.version)), seq.tokens[position]))
        return entries

    def blocks_held(self, num_tokens: int) -> int:
        """No fewer blocks than a match of that length takes, its sources included."""
        return (num_tokens // self.page_size + 2) * len(self.windows)

    def longest_match(self, seq: Sequence) -> tuple[int, int]:
        """By trying every length: what the index can serve now, and what it could if fresh blocks could be copied."""
        self.cache._pool.index.begin(self.step)
        kv = self.cache.new(seq.kv.salt)
        for index in range((len(seq.tokens) - 1) // self.page_size):
            kv.name_block(seq.tokens, index, self.page_size)
        return tuple(
            max(n for n in range(len(seq.tokens)) if self.serves(kv, seq.tokens[:n], fresh)) for fresh in (False, True)
        )

    def serves(self, kv: SequenceKV, tokens: list[int], fresh: bool) -> bool:
        index, page = self.cache._pool.index, self.page_size
        full, rest = divmod(len(tokens), page)
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, len(tokens) - window + 1)
            for block in range(first // page, full):
                content = encode(tokens[block * page : (block + 1) * page])
                if not index.find((group, kv.parent_key(block)), content):
                    return False
            if rest:
                hits = index.longest((group, kv.parent_key(full)), encode(tokens[full * page :]))
                if rest > max(hit.num_tokens for hit in hits[: 1 + fresh]):
                    return False
        return True


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
