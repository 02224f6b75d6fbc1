"""RoPE with the KV write and paged attention in C++, for every instruction set this machine runs.

Right against dense float64 and the reference operators; the same bits alone, in company, in chunks, on any number of
threads; and nothing that a block's former owner left behind ever shows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.kernels import KVLayout, build, reference
from chairlift.kernels import native as ops
from chairlift.kernels.native import ClGroup, ClRequest, ClStep, Native, NormFlags, address_of
from chairlift.kernels.plan import build_attention_plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
THREADS = [1, 2, 3, 4]
SPAN = 1024  # keys that are attended to before the next ones are looked at
HEADS = [  # query heads, key/value heads, head size
    (4, 4, 16),
    (9, 3, 64),
    (8, 1, 80),
    (4, 2, 256),
    (8, 2, 128),
    (6, 2, 96),
    (4, 2, 32),
]
SINKS = torch.linspace(-2, 4, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": SINKS},
    "all": {"window": 40, "softcap": 3.0, "sinks": SINKS},
    "long window": {"window": SPAN + 500},
}


@pytest.fixture(scope="module", params=build.supported_isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[Native]:
    loaded = ops.load(request.param)
    yield loaded
    loaded.set_threads(0)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    chosen: torch.dtype = request.param
    return chosen


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits: 0.0 is not -0.0, and NaN is NaN."""
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens [first, first + count) of a request."""

    request: int
    first: int
    count: int


class Requests:
    """Requests of given lengths with random queries, keys and values, and a cache of one layer for them.

    Blocks lie in any order. All slots but those of the null block hold NaN until they are written.
    """

    def __init__(
        self,
        kernels: Native,
        dtype: torch.dtype,
        lengths: Sequence[int],
        heads: tuple[int, int, int] = (9, 3, 64),
        page_size: int = 16,
        filler: float = math.nan,
    ) -> None:
        self.kernels, self.dtype, self.lengths, self.page_size = kernels, dtype, lengths, page_size
        self.q_heads, self.kv_heads, self.head_dim = heads
        generator = torch.Generator().manual_seed(7)

        def random(length: int, count: int) -> Tensor:
            return torch.randn(length, count * self.head_dim, generator=generator).to(dtype)

        self.queries = [random(length, self.q_heads) for length in lengths]
        self.keys = [random(length, self.kv_heads) for length in lengths]
        self.values = [random(length, self.kv_heads) for length in lengths]
        pages = [-(-length // page_size) for length in lengths]
        blocks = 1 + torch.randperm(sum(pages), generator=generator).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for row, own in enumerate(blocks.split(pages)):
            self.tables[row, : len(own)] = own
        self.cache = torch.full((1 + sum(pages), self.elements(page_size)), filler, dtype=dtype)
        self.cache[0] = 0

    @property
    def everything(self) -> list[Part]:
        return [Part(i, 0, length) for i, length in enumerate(self.lengths)]

    def elements(self, tokens: int) -> int:
        return self.kernels.cache_elements(self.dtype, tokens, self.kv_heads, self.head_dim)

    def step(self, parts: Sequence[Part]) -> tuple[ClStep, object]:
        """The step of these new tokens, and what must outlive it."""
        requests, start = (ClRequest * len(parts))(), 0
        for i, part in enumerate(parts):
            requests[i] = ClRequest(start, part.count, part.first, part.request)
            start += part.count
        groups = (ClGroup * 1)(
            ClGroup(self.tables.data_ptr(), self.tables.stride(0), self.page_size, self.cache.stride(0))
        )
        step = ClStep(
            num_tokens=start, num_requests=len(parts), requests=address_of(requests), groups=address_of(groups)
        )
        return step, (requests, groups)

    def new(self, tensors: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
        return torch.cat([tensors[part.request][part.first : part.first + part.count] for part in parts])

    def store(self, parts: Sequence[Part]) -> None:
        step, memory = self.step(parts)
        q, k, v = (self.new(tensors, parts) for tensors in (self.queries, self.keys, self.values))
        self.kernels.run(ops.rope_store(q, k, v, None, self.cache, head_dim=self.head_dim, group=0), 1, step)
        del memory

    def attend(self, parts: Sequence[Part], **options: Any) -> Tensor:
        """[tokens, query heads * head size]."""
        step, memory = self.step(parts)
        q = self.new(self.queries, parts)
        out = torch.full_like(q, math.nan)
        if (sinks := options.get("sinks")) is not None:
            options["sinks"] = sinks = sinks[: self.q_heads].contiguous()
        sizes = {"head_dim": self.head_dim, "kv_heads": self.kv_heads, "scale": self.head_dim**-0.5}
        self.kernels.run(ops.attend(q, self.cache, out, group=0, **sizes, **options), 1, step)
        del memory
        return out

    def dense(self, parts: Sequence[Part], **options: Any) -> Tensor:
        """The same in float64, from the definition."""
        return torch.cat([self._dense(part, **options) for part in parts])

    def _dense(
        self, part: Part, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        end, sharing = part.first + part.count, self.q_heads // self.kv_heads
        q = self.queries[part.request][part.first : end].double().view(part.count, self.q_heads, -1)
        k, v = (
            tensors[part.request][:end].double().view(end, self.kv_heads, -1).repeat_interleave(sharing, 1)
            for tensors in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query, key = torch.arange(part.first, end)[:, None], torch.arange(end)
        seen = (key <= query) & (key > query - (window or end + 1))
        scores.masked_fill_(~seen, -math.inf)
        if sinks is not None:
            sink = sinks[: self.q_heads].double().view(-1, 1, 1).expand(-1, part.count, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(part.count, -1)


# Attention ----------------------------------------------------------------------------------------------------------

MIX = [Part(0, 0, 1), Part(1, 30, 1), Part(2, 0, 7), Part(3, 20, 50), Part(4, 199, 1), Part(5, 63, 2)]
MIX_LENGTHS = [part.first + part.count for part in MIX]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(kernels: Native, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    for page_size in (16, 32, 256):
        requests = Requests(kernels, dtype, MIX_LENGTHS, heads, page_size)
        requests.store(requests.everything)
        for options in OPTIONS.values():
            close(requests.attend(MIX, **options), requests.dense(MIX, **options))


def test_attention_over_long_contexts(kernels: Native, dtype: torch.dtype) -> None:
    parts = [Part(i, first, count) for i, (first, count) in enumerate([(1018, 12), (2047, 1), (2048, 3), (3100, 1)])]
    requests = Requests(kernels, dtype, [part.first + part.count for part in parts], (6, 2, 32))
    requests.store(requests.everything)
    for options in OPTIONS.values():
        close(requests.attend(parts, **options), requests.dense(parts, **options))


def test_attention_agrees_with_the_reference(kernels: Native, dtype: torch.dtype) -> None:
    requests = Requests(kernels, dtype, MIX_LENGTHS)
    requests.store(requests.everything)
    rows = 16 * len(requests.cache), requests.kv_heads, requests.head_dim
    key_cache, value_cache = (torch.zeros(rows, dtype=dtype).view(-1, 16, *rows[1:]) for _ in range(2))
    for part, table in zip(requests.everything, requests.tables, strict=True):
        positions = torch.arange(part.count)
        slots = table[positions // 16] * 16 + positions % 16
        k, v = (tensors[part.request].view(-1, *rows[1:]) for tensors in (requests.keys, requests.values))
        reference.store_kv(k, v, key_cache, value_cache, slots)
    for options in OPTIONS.values():
        lengths = np.array([part.count for part in MIX]), np.array(MIX_LENGTHS)
        plan = build_attention_plan(
            *lengths, requests.tables.numpy(), layout=KVLayout.of(key_cache), window=options.get("window")
        )
        query = requests.new(requests.queries, MIX).view(-1, 9, 64)
        rest = {name: value for name, value in options.items() if name != "window"}
        expected = reference.paged_attention(query, key_cache, value_cache, plan, scale=64**-0.5, **rest)
        close(requests.attend(MIX, **options), expected.view(-1, 9 * 64))


def test_scores_of_any_size(kernels: Native, dtype: torch.dtype) -> None:
    """Weights are relative to the largest score, wherever it is, and one key may take all."""
    requests = Requests(kernels, dtype, [2 * SPAN + 30], (2, 2, 16))
    requests.keys[0][5] *= 100
    requests.keys[0][SPAN + 5] *= 300
    requests.queries[0] *= 20
    requests.store(requests.everything)
    parts = [Part(0, 2 * SPAN - 10, 40)]
    close(requests.attend(parts), requests.dense(parts))


# The same bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("heads", [(4, 4, 16), (9, 3, 64), (8, 1, 80), (4, 2, 96)], ids=str)
def test_rows_have_the_same_bits_in_any_company(
    kernels: Native, dtype: torch.dtype, heads: tuple[int, int, int], name: str
) -> None:
    options, lengths = OPTIONS[name], [1, 90, 17, 200, 64]
    requests = Requests(kernels, dtype, lengths, heads, page_size=32)
    requests.store(requests.everything)
    kernels.set_threads(1)
    alone = [requests.attend([part], **options) for part in requests.everything]
    for threads in THREADS:
        kernels.set_threads(threads)
        assert same(requests.attend(requests.everything, **options), torch.cat(alone)), threads
        parts = [Part(3, 100, 71), Part(1, 88, 1), Part(4, 1, 63), Part(0, 0, 1), Part(2, 10, 3)]
        mixed = torch.cat([alone[part.request][part.first : part.first + part.count] for part in parts])
        assert same(requests.attend(parts, **options), mixed), threads
        decode = [Part(i, length - 1, 1) for i, length in enumerate(lengths)]
        assert same(requests.attend(decode, **options), torch.stack([rows[-1] for rows in alone])), threads
    for size in (1, 3, 31, 64):
        chunks = [Part(3, first, min(size, 200 - first)) for first in range(0, 200, size)]
        assert same(torch.cat([requests.attend([chunk], **options) for chunk in chunks]), alone[3]), size


@pytest.mark.parametrize("name", ["plain", "all", "long window"])
def test_rows_with_long_contexts_have_the_same_bits(kernels: Native, dtype: torch.dtype, name: str) -> None:
    options, lengths = OPTIONS[name], [3 * SPAN + 20, SPAN + 8, 5, 2 * SPAN]
    requests = Requests(kernels, dtype, lengths, (6, 2, 32))
    requests.store(requests.everything)
    kernels.set_threads(1)
    parts = [Part(0, 3 * SPAN - 3, 8), Part(1, SPAN - 8, 11), Part(2, 0, 5), Part(3, 2 * SPAN - 9, 9)]
    alone = [requests.attend([part], **options) for part in parts]
    for threads in THREADS:
        kernels.set_threads(threads)
        assert same(requests.attend(parts, **options), torch.cat(alone)), threads
        for part, rows in zip(parts, alone, strict=True):
            i = part.count // 2
            row = Part(part.request, part.first + i, 1)
            assert same(requests.attend([row], **options)[0], rows[i]), (threads, row)
            rest = [Part(part.request, part.first + i, part.count - i), Part(2, 4, 1)]
            assert same(requests.attend(rest, **options)[:-1], rows[i:]), (threads, rest)


def test_the_size_of_pages_changes_no_bit(kernels: Native, dtype: torch.dtype) -> None:
    results = []
    for page_size in (16, 32, 64, 256):
        requests = Requests(kernels, dtype, MIX_LENGTHS, page_size=page_size)
        requests.store(requests.everything)
        results.append(requests.attend(MIX))
    assert all(same(result, results[0]) for result in results[1:])


# What former owners left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 2, 80)], ids=str)
def test_unwritten_slots_never_show(kernels: Native, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    fillers = [math.nan, math.inf, 0.0]
    each = [Requests(kernels, dtype, [70], heads, page_size=32, filler=filler) for filler in fillers]
    for position in range(70):
        parts = [Part(0, position, 1)]
        for requests in each:
            requests.store(parts)
        results = [requests.attend(parts) for requests in each]
        assert results[0].isfinite().all(), position
        assert same(results[0], results[1]), position
        assert same(results[0], results[2]), position


@pytest.mark.parametrize("chunk", [3, 16, 37])
def test_chunks_see_what_the_chunks_before_them_wrote(kernels: Native, dtype: torch.dtype, chunk: int) -> None:
    whole, requests = Requests(kernels, dtype, [100]), Requests(kernels, dtype, [100])
    whole.store(whole.everything)
    rows = []
    for first in range(0, 100, chunk):
        parts = [Part(0, first, min(chunk, 100 - first))]
        requests.store(parts)
        rows.append(requests.attend(parts))
    assert same(torch.cat(rows), whole.attend(whole.everything))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_the_copied_beginning_of_a_block_is_all_that_is_needed(
    kernels: Native, dtype: torch.dtype, tokens: int
) -> None:
    whole, requests = Requests(kernels, dtype, [60], page_size=64), Requests(kernels, dtype, [60], page_size=64)
    whole.store(whole.everything)
    copied = whole.elements(-(-tokens // 16) * 16)
    requests.cache[1, :copied] = whole.cache[1, :copied]
    rest = [Part(0, tokens, 60 - tokens)]
    requests.store(rest)
    assert same(requests.attend(rest), whole.attend(rest))


def test_pages_behind_the_window_are_not_read(kernels: Native, dtype: torch.dtype) -> None:
    requests = Requests(kernels, dtype, [SPAN + 200])
    requests.store(requests.everything)
    parts = [Part(0, SPAN + 100, 100)]
    before = requests.attend(parts, window=50)
    oldest = SPAN + 100 - 49
    requests.tables[0, : oldest // 16] = 1 << 30
    assert same(requests.attend(parts, window=50), before)


def test_the_null_block_is_not_written(kernels: Native, dtype: torch.dtype) -> None:
    requests = Requests(kernels, dtype, MIX_LENGTHS)
    requests.store(requests.everything)
    assert not requests.cache[0].any()


# RoPE and norms of heads --------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` [tokens, heads, head size], float64, turned in its first `cos.shape[1]` numbers."""
    cos, sin, size = cos.double()[:, None], sin.double()[:, None], cos.shape[1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        partner = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        partner = torch.cat([-high, low], -1)
    return torch.cat([turned * cos + partner * sin, rest], -1)


def normed(x: Tensor, weight: Tensor, flags: NormFlags, eps: float) -> Tensor:
    scale = x.double().square().mean(-1, keepdim=True).add(eps).rsqrt()
    factor = weight.double() + 1 if flags & NormFlags.PLUS_ONE else weight.double()
    return x.double() * scale * factor


def angles(positions: Tensor, size: int, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = positions[:, None] / 100.0 ** (torch.arange(size // 2) / max(1, size // 2))
    angle = turns.repeat_interleave(2, 1) if interleaved else torch.cat([turns, turns], 1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("flags", [None, NormFlags(0), NormFlags.ROUND_FIRST, NormFlags.PLUS_ONE], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 20), (16, 16), (96, 0)])
def test_rotation_norms_and_storage(
    kernels: Native, dtype: torch.dtype, head_dim: int, rotary_dim: int, flags: NormFlags | None, interleaved: bool
) -> None:
    """Queries, keys and values are views of one buffer; only the first two are changed, in place."""
    q_heads, kv_heads, tokens = 4, 2, 45
    requests = Requests(kernels, dtype, [tokens], (q_heads, kv_heads, head_dim))
    widths = [q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    buffer = torch.randn(tokens, sum(widths) + 7).to(dtype)
    q, k, v, beside = buffer.split([*widths, 7], 1)
    before = [part.clone().view(tokens, -1, head_dim) for part in (q, k, v)]
    edge = beside.clone()
    norms = None if flags is None else ((1 + 0.2 * torch.randn(head_dim)).to(dtype), torch.randn(head_dim).to(dtype))
    cos, sin = angles(torch.arange(tokens), rotary_dim, interleaved, dtype)

    step, memory = requests.step(requests.everything)
    op = ops.rope_store(
        q,
        k,
        v,
        (cos, sin) if rotary_dim else None,
        requests.cache,
        head_dim=head_dim,
        group=0,
        norms=norms,
        flags=flags or 0,
        eps=1e-5,
        interleaved=interleaved,
    )
    kernels.run(op, 1, step)
    del memory

    for i, part in enumerate((q, k)):
        expected = before[i].double()
        if norms is not None:
            expected = normed(before[i], norms[i], flags or NormFlags(0), 1e-5)
        close(part.reshape(tokens, -1, head_dim), rotated(expected, cos, sin, interleaved))
    assert same(v.reshape(before[2].shape), before[2])
    assert same(beside, edge)
    requests.queries[0], requests.keys[0], requests.values[0] = q.clone(), k.clone(), v.clone()
    last = [Part(0, 30, 15)]
    close(requests.attend(last), requests.dense(last))


def test_angles_may_come_from_tables_of_all_positions(kernels: Native, dtype: torch.dtype) -> None:
    requests = Requests(kernels, dtype, [40, 7], (2, 1, 64))
    parts = [Part(0, 30, 10), Part(1, 2, 5)]
    step, memory = requests.step(parts)
    positions = torch.cat([torch.arange(part.first, part.first + part.count) for part in parts])
    cos, sin = angles(torch.arange(50), 64, False, dtype)
    q, k = torch.randn(15, 128).to(dtype), torch.randn(15, 64).to(dtype)

    def run(by_position: bool, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        turned = q.clone(), k.clone()
        pages = {"cache": requests.cache, "head_dim": 64, "group": 0}
        kernels.run(ops.rope_store(*turned, k, rotation, **pages, by_position=by_position), 1, step)
        return turned

    by_token, by_position = run(False, (cos[positions], sin[positions])), run(True, (cos, sin))
    del memory
    assert same(by_token[0], by_position[0])
    assert same(by_token[1], by_position[1])


def test_rounding_of_a_norm_follows_the_flag(kernels: Native, dtype: torch.dtype) -> None:
    x, weight = torch.randn(33, 64).to(dtype), torch.randn(64).to(dtype)
    requests = Requests(kernels, dtype, [33], (1, 1, 64))
    step, memory = requests.step(requests.everything)
    results = {}
    for flags in (NormFlags(0), NormFlags.ROUND_FIRST):
        q, k = x.clone(), x.clone()
        op = ops.rope_store(
            q, k, k, None, requests.cache, head_dim=64, group=0, norms=(weight, weight), flags=flags, eps=1e-6
        )
        kernels.run(op, 1, step)
        results[flags] = q
        assert same(q, k)
    del memory
    assert same(*results.values()) == (dtype == torch.float32)
    scaled = kernels.norm(x, None, eps=1e-6, flags=NormFlags(0))
    assert same(results[NormFlags.ROUND_FIRST], scaled * weight)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_are_rotated_and_stored_the_same_in_any_company(
    kernels: Native, dtype: torch.dtype, interleaved: bool
) -> None:
    lengths = [33, 1, 150]
    whole, pieces = (Requests(kernels, dtype, lengths, filler=0.0) for _ in range(2))
    weights = torch.randn(64).to(dtype), torch.randn(64).to(dtype)

    def run(requests: Requests, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        step, memory = requests.step(parts)
        q, k, v = (requests.new(tensors, parts) for tensors in (requests.queries, requests.keys, requests.values))
        positions = torch.cat([torch.arange(part.first, part.first + part.count) for part in parts])
        rotation = angles(positions, 64, interleaved, dtype)
        op = ops.rope_store(
            q,
            k,
            v,
            rotation,
            requests.cache,
            head_dim=64,
            group=0,
            norms=weights,
            flags=NormFlags.ROUND_FIRST,
            eps=1e-6,
            interleaved=interleaved,
        )
        requests.kernels.run(op, 1, step)
        del memory
        return q, k

    kernels.set_threads(1)
    q, k = run(whole, whole.everything)
    for threads in THREADS:
        kernels.set_threads(threads)
        pieces.cache.zero_()
        first = [Part(2, 0, 70), Part(0, 0, 33)]
        second = [Part(1, 0, 1), Part(2, 70, 80)]
        some, others = run(pieces, first), run(pieces, second)
        assert same(torch.cat([some[0][70:], others[0][:1], some[0][:70], others[0][1:]]), q)
        assert same(torch.cat([some[1][70:], others[1][:1], some[1][:70], others[1][1:]]), k)
        assert same(pieces.cache, whole.cache)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_a_page_size_that_is_not_whole_units_is_refused(kernels: Native) -> None:
    requests = Requests(kernels, torch.float32, [8], page_size=32)
    requests.page_size = 24
    with pytest.raises(ValueError, match="no kernel for these sizes"):
        requests.attend(requests.everything)


@pytest.mark.parametrize("heads", [(9, 2, 64), (4, 2, 7)], ids=str)
def test_heads_that_do_not_fit_are_refused(kernels: Native, heads: tuple[int, int, int]) -> None:
    requests = Requests(kernels, torch.float32, [8])
    requests.q_heads, requests.kv_heads, requests.head_dim = heads
    step, memory = requests.step(requests.everything)
    q = torch.zeros(8, heads[0] * heads[2])
    op = ops.attend(q, requests.cache, q.clone(), head_dim=heads[2], kv_heads=heads[1], group=0, scale=1.0)
    with pytest.raises(ValueError, match="out of range"):
        kernels.run(op, 1, step)
    del memory
