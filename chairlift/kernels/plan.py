"""Plan one step of paged attention: which cache rows meet which queries, as index tensors.

Built once per step on the host, run by every layer of a group. Knows lengths, block tables and strides; refuses to know
models, heads of the query, and the contents of the cache.

The work is a list of *pairs*: a tile of queries of one request against a tile of its keys. Key tiles start at multiples
of `KEY_TILE` from position 0 of the request, whatever the page size, the chunk and the company, so that the sums over
keys are taken in an order that depends on the query's position alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KEY_TILE = 64
QUERY_TILE = 32
SLICE_BYTES = 16 << 20  # of float32 keys in flight at once: a slice of the work stays in the last-level cache
MASKED = -1e30  # added to the score of a key that a query does not see; finite, so that a tile may be masked whole

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Where a token's keys (or values) lie: a cache seen as rows of `head_dim` numbers, strides counted in rows.

    The heads of a token are neighbours.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    block_stride: int
    token_stride: int

    @classmethod
    def of(cls, cache: Tensor) -> "KVLayout":
        """The layout of `cache` [num_blocks, page_size, kv_heads, head_dim], a tensor or a strided view of one."""
        _, page_size, num_kv_heads, head_dim = cache.shape
        block, token, head, number = cache.stride()
        if number != 1 or head != head_dim or block % head_dim or token % head_dim:
            raise ValueError(f"KV cache strides {cache.stride()} are not whole rows of head_dim={head_dim} numbers")
        return cls(
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_stride=block // head_dim,
            token_stride=token // head_dim,
        )


class Scratch:
    """Named buffers that grow and are reused: fresh memory costs more in page faults than the arithmetic done on it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of `shape`, valid until `name` is taken again."""
        size = int(np.prod(shape))
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSlice:
    """Query tiles, longest context first, with all of their key tiles: first everyone's first one, then the second, ...

    Key tile j belongs to the first `active[j]` query tiles, so a sum over key tiles is a loop over slices of the pairs.
    """

    query_tile: int
    active: tuple[int, ...]
    tokens: Tensor  # int64 [query_tiles * query_tile], rows of the packed query; a short tile repeats its last token
    pair_tile: Tensor  # int64 [pairs], the query tile of each pair
    rows: Tensor  # int64 [pairs * KEY_TILE], each token's first row of the cache; an unused place reads the NULL block
    bias: Tensor  # float32 [pairs, 1, query_tile * KEY_TILE]: 0 where the query sees the key, else MASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One step's attention for all layers that share block tables, window and layout."""

    num_tokens: int
    layout: KVLayout
    slices: tuple[AttentionSlice, ...]
    scratch: Scratch = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryTiles:
    """Tiles of queries of one size; every array has one entry per tile."""

    size: int
    request: IntArray
    start: IntArray  # the tile's first token in the packed query
    length: IntArray  # its tokens, 1 to size
    position: IntArray  # position of its first token in the request
    first_key: IntArray  # oldest position any of its queries sees
    num_key_tiles: IntArray

    def __getitem__(self, index: slice | IntArray) -> "_QueryTiles":
        return _QueryTiles(
            size=self.size,
            request=self.request[index],
            start=self.start[index],
            length=self.length[index],
            position=self.position[index],
            first_key=self.first_key[index],
            num_key_tiles=self.num_key_tiles[index],
        )


def build_attention_plan(
    query_lens: npt.ArrayLike,  # [requests], new tokens of each in this step, in packed order; at least 1
    kv_lens: npt.ArrayLike,  # [requests], tokens in the cache once the new ones are stored
    block_tables: npt.NDArray[np.int32],  # [requests, blocks], entries past a request's end are not read
    *,
    layout: KVLayout,
    window: int | None = None,  # a query sees itself and the window - 1 tokens before it; None = all of them
    scratch: Scratch | None = None,  # share one between steps; plans that share it must not run at the same time
) -> AttentionPlan:
    """Plan causal attention of packed queries over paged keys. Blocks wholly before the window may be NULL (0).

    Raises `ValueError` when a length makes no sense.
    """
    queries, keys = np.asarray(query_lens, np.int64), np.asarray(kv_lens, np.int64)
    if queries.shape != keys.shape or (queries < 1).any() or (keys < queries).any():
        raise ValueError(f"attention needs 1 <= query_lens <= kv_lens, got {queries.tolist()} and {keys.tolist()}")
    max_pairs = max(1, SLICE_BYTES // (4 * layout.num_kv_heads * KEY_TILE * layout.head_dim))
    slices = []
    for size, chosen in ((1, queries == 1), (QUERY_TILE, queries > 1)):
        tiles = _query_tiles(size, np.flatnonzero(chosen), queries, keys, window)
        slices += [_slice(part, block_tables, layout, window) for part in _cut(tiles, max_pairs)]
    return AttentionPlan(
        num_tokens=int(queries.sum()), layout=layout, slices=tuple(slices), scratch=scratch or Scratch()
    )


def _query_tiles(size: int, requests: IntArray, queries: IntArray, keys: IntArray, window: int | None) -> _QueryTiles:
    """All query tiles of `requests`, those with most key tiles first."""
    counts = -(-queries[requests] // size)
    request = np.repeat(requests, counts)
    offset = _ranges(counts) * size
    length = np.minimum(size, queries[request] - offset)
    position = keys[request] - queries[request] + offset
    first_key = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    tiles = _QueryTiles(
        size=size,
        request=request,
        start=(np.cumsum(queries) - queries)[request] + offset,
        length=length,
        position=position,
        first_key=first_key,
        num_key_tiles=(position + length - 1) // KEY_TILE - first_key // KEY_TILE + 1,
    )
    return tiles[np.argsort(-tiles.num_key_tiles, kind="stable")]


def _cut(tiles: _QueryTiles, max_pairs: int) -> Iterator[_QueryTiles]:
    """Consecutive query tiles with at most `max_pairs` key tiles together, but at least one."""
    ends = np.cumsum(tiles.num_key_tiles)
    start = 0
    while start < len(ends):
        before = ends[start] - tiles.num_key_tiles[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + max_pairs, side="right")))
        yield tiles[start:stop]
        start = stop


def _slice(
    tiles: _QueryTiles, block_tables: npt.NDArray[np.int32], layout: KVLayout, window: int | None
) -> AttentionSlice:
    rounds = np.arange(tiles.num_key_tiles[0])
    active = len(tiles.request) - np.searchsorted(tiles.num_key_tiles[::-1], rounds, side="right")
    pair_tile = _ranges(active)
    pairs = tiles[pair_tile]

    first_tile = pairs.first_key // KEY_TILE + np.repeat(rounds, active)
    key = first_tile[:, None] * KEY_TILE + np.arange(KEY_TILE)  # [pairs, KEY_TILE], positions in the request
    last_query = pairs.position + pairs.length - 1
    live = (key >= pairs.first_key[:, None]) & (key <= last_query[:, None])
    page, offset = np.divmod(np.where(live, key, 0), layout.page_size)
    block = block_tables[pairs.request[:, None], page].astype(np.int64)
    row = np.where(live, block * layout.block_stride + offset * layout.token_stride, 0)

    query = np.minimum(pairs.position[:, None] + np.arange(tiles.size), last_query[:, None])[:, :, None]
    seen = key[:, None, :] <= query
    if window is not None:
        seen &= key[:, None, :] > query - window
    tokens = tiles.start[:, None] + np.minimum(np.arange(tiles.size), tiles.length[:, None] - 1)
    return AttentionSlice(
        query_tile=tiles.size,
        active=tuple(active.tolist()),
        tokens=torch.from_numpy(tokens.reshape(-1)),
        pair_tile=torch.from_numpy(pair_tile),
        rows=torch.from_numpy(row.reshape(-1)),
        bias=torch.from_numpy(np.where(seen, np.float32(0), np.float32(MASKED)).reshape(len(key), 1, -1)),
    )


def _ranges(counts: IntArray) -> IntArray:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, ... in one array."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(ends - counts, counts)
