"""The blocks of one sequence, per layer group, and the copies that their moves ask for.

Knows neither the pool nor the request: it is the record that `KVCache` keeps about a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from chairlift.cache.allocators import NEVER
from chairlift.cache.hashing import chain_key, encode

NULL_BLOCK = 0  # stands in a table where a sliding group handed a block back; its memory is always zero


class BlockCopy(NamedTuple):
    """The first `num_tokens` tokens of a block, in all storages.

    Swaps move whole pages and name a host block: the target of a swap_out, the source of a swap_in.
    """

    kind: Literal["copy", "swap_out", "swap_in"]
    source: int
    target: int
    num_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceKV:
    """Where the keys and values of one sequence are. Only `KVCache` changes it."""

    salt: bytes
    version: int  # of the weights that `root` names
    root: bytes  # key of the empty prefix
    tables: list[list[int]]  # [group][index]: block; all groups have the same length
    first: list[int]  # [group]: index of the first block still held, NULL_BLOCK before it
    keys: list[bytes] = field(default_factory=list)  # of the full blocks from the start; survives release
    host_tables: list[list[int]] = field(
        default_factory=list
    )  # like `tables`, in host memory; empty unless swapped out
    num_registered: int = 0  # full blocks from the start that were offered to the index
    num_queried: int = 0  # tokens that the last match asked for and found, until they are counted
    num_hit: int = 0
    capacity: int = 0  # tokens that the tables have room for
    slide_at: int = NEVER  # the next `num_computed` at which a group can hand back a block
    commit_at: int = NEVER  # the next number of tokens at which there is something to register

    @property
    def is_swapped_out(self) -> bool:
        return bool(self.host_tables)

    def parent_key(self, index: int) -> bytes:
        """Key of everything before block `index`; the blocks before it must have been named."""
        return self.keys[index - 1] if index else self.root

    def name_block(self, tokens: Sequence[int], index: int, page_size: int) -> tuple[bytes, bytes]:
        """Key of what precedes full block `index`, and its encoded tokens; remembers the key of the block itself."""
        parent = self.parent_key(index)
        content = encode(tokens[index * page_size : (index + 1) * page_size])
        if index == len(self.keys):
            self.keys.append(chain_key(parent, content))
        return parent, content
