"""The pool against a model of it: free, referenced and cached blocks are all there are, and the right ones go first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.cache.hashing import chain_key, encode, root_key
from chairlift.cache.pool import BlockPool

CONTENTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(encode)
PARENTS = st.sampled_from([(0, root_key(b"a", 0)), (1, root_key(b"a", 0)), (0, chain_key(root_key(b"a", 0), b"x"))])


class PoolMachine(RuleBasedStateMachine):
    """Keeps, beside the pool, what each block should be."""

    @initialize(num_blocks=st.integers(1, 8))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = set(range(1, num_blocks + 1))
        self.references: dict[int, int] = {}
        self.cached: list[int] = []  # least recently used first
        self.registered: dict[int, tuple[tuple[int, bytes], bytes]] = {}
        self.step = 0

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        blocks = self.pool.allocate(n)
        if n > len(self.free) + len(self.cached):
            assert blocks is None
            return
        assert blocks is not None and len(blocks) == n
        evicted = self.cached[: max(0, n - len(self.free))]
        assert set(blocks) - self.free == set(evicted), "only what is needed is evicted, the least recently used first"
        self.cached = self.cached[len(evicted) :]
        for block in blocks:
            self.free.discard(block)
            self.registered.pop(block, None)
            self.references[block] = 1

    @precondition(lambda self: self.references or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.references, *self.cached])))
        self.pool.acquire(block)
        if block in self.cached:
            self.cached.remove(block)
        self.references[block] = self.references.get(block, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.references)), unique=True, min_size=1))
        self.pool.release(blocks, keep)
        for block in blocks:
            self.references[block] -= 1
            if self.references[block]:
                continue
            del self.references[block]
            if keep and block in self.registered:
                self.cached.append(block)
            else:
                self.registered.pop(block, None)
                self.free.add(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), parent=PARENTS, content=CONTENTS, next_step=st.booleans())
    def register(self, data: st.DataObject, parent: tuple[int, bytes], content: bytes, next_step: bool) -> None:
        self.step += next_step
        self.pool.index.begin(self.step)
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.index.add(block, parent, content)
        self.registered.pop(block, None)
        if not any(place == parent and held.startswith(content) for place, held in self.registered.values()):
            self.registered[block] = parent, content

    @rule(parent=PARENTS, content=CONTENTS)
    def find(self, parent: tuple[int, bytes], content: bytes) -> None:
        block = self.pool.index.find(parent, content)
        if block:
            assert self.registered[block] == (parent, content)
        else:
            assert (parent, content) not in self.registered.values()

    @rule(parent=PARENTS, content=CONTENTS)
    def longest(self, parent: tuple[int, bytes], content: bytes) -> None:
        def common(held: bytes) -> int:
            return next(n for n in range(len(content) // 4, -1, -1) if held[: 4 * n] == content[: 4 * n])

        best = max((common(held) for place, held in self.registered.values() if place == parent), default=0)
        hits = self.pool.index.longest(parent, content)
        assert max(hit.num_tokens for hit in hits) == best
        for block, num_tokens in hits:
            assert block == 0 or (
                self.registered[block][0] == parent and common(self.registered[block][1]) == num_tokens
            )

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.free.update(self.cached)
        self.cached.clear()
        self.registered.clear()

    @invariant()
    def is_as_modelled(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len(self.references)
        assert len(self.pool.index) == len(self.registered)
        assert all(self.pool.num_references(block) == count for block, count in self.references.items())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_was_freed_last_is_handed_out_first_and_new_blocks_before_cached_ones() -> None:
    pool = BlockPool(5)
    assert pool.allocate(3) == [1, 2, 3]
    pool.index.add(2, (0, root_key(b"", 0)), encode([7]))
    pool.release([1, 2, 3])
    assert pool.allocate(2) == [3, 1]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_cached == 1
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [2]
    assert len(pool.index) == 0


@pytest.mark.parametrize("block", [1, 2])
def test_a_block_released_too_often_is_refused(block: int) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.release([1])
    with pytest.raises(ValueError, match=f"block {block} is released more often"):
        pool.release([block])
