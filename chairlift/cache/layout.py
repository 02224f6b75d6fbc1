"""Layer groups and bytes: how the attention layers of a model share blocks of one size.

A *page* holds keys and values of `page_size` tokens of one layer. A *block* is one page in each of `num_storages`
storages, and is what the pool hands out. Layers that share a window form groups; a group has one block table per
sequence, and its layer number `s` keeps its page in storage `s`. Knows no tensor and no model, only stated numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.cache.allocators import CacheAllocator, FullAttentionAllocator, SlidingWindowAllocator

MAX_PADDING = 0.10  # share of pages that may belong to no layer, so that groups can be larger and tables fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One attention layer as the model states it."""

    index: int
    window: int | None  # tokens that a query sees, itself included; None: all
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Layers that share one block table. The position in `layers` is the storage index."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How the layers of one model share blocks."""

    page_size: int  # tokens
    groups: tuple[GroupSpec, ...]
    num_storages: int  # pages per block
    page_bytes: int  # keys and values of one page

    @property
    def block_bytes(self) -> int:
        return self.num_storages * self.page_bytes

    def place(self, layer_index: int) -> tuple[int, int]:
        """(group, storage) of a layer. Raises `KeyError` for a layer that has no cache."""
        for group, spec in enumerate(self.groups):
            if layer_index in spec.layers:
                return group, spec.layers.index(layer_index)
        raise KeyError(f"layer {layer_index} has no place in the cache")

    def allocators(self) -> list[CacheAllocator]:
        """What each group needs, in the order of `groups`."""
        return [
            FullAttentionAllocator(self.page_size)
            if group.window is None
            else SlidingWindowAllocator(self.page_size, group.window)
            for group in self.groups
        ]

    def blocks_needed(self, num_tokens: int, chunk: int) -> int:
        """Blocks of all groups that one sequence holds at most, growing to `num_tokens` in chunks <= `chunk`."""
        return sum(allocator.peak_blocks(num_tokens, chunk) for allocator in self.allocators())


def plan_layout(layers: Sequence[LayerSpec], page_size: int, itemsize: int) -> CacheLayout:
    """Group `layers` by window into groups of equal size.

    Groups are as large as they can be with at most 10 % of the pages unused: a model with one kind of layer is one
    group; 22 sliding and 4 full layers become 6 + 1 groups of at most 4 layers. A page has room for the largest layer.

    Args:
        layers: the layers that have a cache, in any order; at least one.
        page_size: tokens per page.
        itemsize: bytes of one key or value element.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.window, []).append(layer.index)
    size = _group_size([len(members) for members in kinds.values()])
    groups = tuple(
        GroupSpec(window=window, layers=tuple(members[first : first + size]))
        for window, members in kinds.items()
        for first in range(0, len(members), size)
    )
    page_bytes = max(2 * page_size * layer.num_kv_heads * layer.head_dim * itemsize for layer in layers)
    return CacheLayout(page_size=page_size, groups=groups, num_storages=size, page_bytes=page_bytes)


def _group_size(counts: list[int]) -> int:
    """The largest group size that leaves at most `MAX_PADDING` of the pages unused. Size 1 leaves none."""
    limit = (1 + MAX_PADDING) * sum(counts)
    return next(size for size in range(max(counts), 0, -1) if sum(-(-n // size) * size for n in counts) <= limit)
