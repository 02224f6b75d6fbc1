"""What a prefix is called, and which block holds what comes after it.

The key of a full block names everything up to its end: a chain of 128-bit hashes that begins with the sequence's salt
and the version of the weights. Below each key the index keeps the *contents* of the blocks that continue it, so a hit
always compares tokens. Knows blocks by number only: who references them and when they go is the pool's business.
"""

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

_TOKEN_BYTES = 4

Parent = tuple[int, bytes]  # (layer group, key of all blocks before)
Child = tuple[bytes, int]  # (encoded tokens, block)


def root_key(salt: bytes, version: int) -> bytes:
    """Key of the empty prefix. Sequences share blocks only below one root."""
    return blake2b(version.to_bytes(8) + salt, digest_size=16, person=b"root").digest()


def chain_key(parent: bytes, content: bytes) -> bytes:
    """Key of the prefix `parent` continued by one full block."""
    return blake2b(parent + content, digest_size=16, person=b"block").digest()


def encode(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes that sort like the tokens do and can be compared token by token."""
    return struct.pack(f">{len(tokens)}I", *tokens)


def num_common(a: bytes, b: bytes) -> int:
    """Tokens of the longest common beginning of two encoded contents."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size]) ^ int.from_bytes(b[:size])
    return (8 * size - difference.bit_length()) // (8 * _TOKEN_BYTES)


class Hit(NamedTuple):
    """The first `num_tokens` tokens in `block` are the ones asked for; block 0 and no tokens: nothing found."""

    block: int = 0
    num_tokens: int = 0


NOTHING = Hit()


class PrefixIndex:
    """Finds blocks by what they hold.

    A block enters with the content it has by then; its owner may go on writing behind that. Blocks that entered in
    the current step are *fresh*: their keys and values are written by this step's forward pass, in time for attention,
    but too late for the copies that run before it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Parent, bytes]] = {}
        self._ready: dict[Parent, list[Child]] = {}  # children are sorted, so that neighbours have most in common
        self._fresh: dict[Parent, list[Child]] = {}
        self._step = -1

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def begin(self, step: int) -> None:
        """What entered in steps before `step` is ready from now on."""
        if step <= self._step:
            return
        self._step = step
        for parent, children in self._fresh.items():
            ready = self._ready.setdefault(parent, [])
            for child in children:
                insort(ready, child)
        self._fresh.clear()

    def add(self, block: int, parent: Parent, content: bytes) -> None:
        """Make `block` findable, in place of what it was found by before.

        Does nothing more when another block already offers all of `content` in the same place.
        """
        if block in self._entries:
            if self._entries[block] == (parent, content):
                return
            self.discard(block)
        if max(hit.num_tokens for hit in self.longest(parent, content)) * _TOKEN_BYTES < len(content):
            self._entries[block] = (parent, content)
            insort(self._fresh.setdefault(parent, []), (content, block))

    def discard(self, block: int) -> None:
        """Forget a block; does nothing if it is not known."""
        if block not in self._entries:
            return
        parent, content = self._entries.pop(block)
        for level in (self._fresh, self._ready):
            children = level.get(parent, [])
            at = bisect_left(children, (content, block))
            if at < len(children) and children[at] == (content, block):
                del children[at]
                if not children:
                    del level[parent]

    def clear(self) -> None:
        self._entries.clear()
        self._ready.clear()
        self._fresh.clear()

    def find(self, parent: Parent, content: bytes) -> int:
        """The block that holds exactly `content`, ready or fresh; 0 if there is none."""
        for level in (self._ready, self._fresh):
            if children := level.get(parent):
                at = bisect_left(children, (content, 0))
                if at < len(children) and children[at][0] == content:
                    return children[at][1]
        return 0

    def longest(self, parent: Parent, content: bytes) -> tuple[Hit, Hit]:
        """The ready and the fresh block that have the longest beginning in common with `content`."""
        return _nearest(self._ready.get(parent, ()), content), _nearest(self._fresh.get(parent, ()), content)

    def check(self) -> None:
        """Raise `AssertionError` if the two directions of the index disagree."""
        children: dict[int, tuple[Parent, bytes]] = {}
        for level in (self._ready, self._fresh):
            for parent, siblings in level.items():
                assert siblings and all(a < b for a, b in pairwise(siblings)), f"children of {parent} are not in order"
                children.update({block: (parent, content) for content, block in siblings})
        assert children == self._entries, "a block and its place in the index disagree"


def _nearest(children: Sequence[Child], content: bytes) -> Hit:
    """In sorted children, the longest common beginning is next to where `content` would stand."""
    best = NOTHING
    at = bisect_left(children, (content, 0))
    for child, block in children[max(0, at - 1) : at + 1]:
        num_tokens = num_common(child, content)
        if num_tokens > best.num_tokens:
            best = Hit(block, num_tokens)
    return best
