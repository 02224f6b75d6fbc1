"""The reference operators: right, against dense float64, and bit for bit the same whatever they are computed with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels import KVLayout, Scratch, ops_for
from chairlift.kernels import reference as kernels
from chairlift.kernels.native import Activation, NormFlags
from chairlift.kernels.plan import KEY_TILE, QUERY_TILE, build_attention_plan
from chairlift.kernels.threads import release_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64, 65, 100, 129]
SHAPES = [
    (8, 8),
    (7, 5),
    (1, 16),
    (16, 1),
    (30, 97),
    (64, 32),
    (48, 128),
    (257, 100),
    (576, 960),
    (1536, 576),
    (4096, 64),
]


def bits(x: Tensor) -> Tensor:
    """The bits of `x`, so that equality tells 0.0 from -0.0 and NaN equals itself."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def rows_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(row[None]) for row in x])


# Linear -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_linear_gives_a_row_the_same_bits_in_any_company(
    in_features: int, out_features: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features).to(dtype) if biased else None
    x = torch.randn(140, in_features).to(dtype)
    packed = kernels.pack_linear(weight, bias)
    whole = kernels.linear(x, packed)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for rows in ROWS:
        start = 140 - rows
        assert same(kernels.linear(x[start:], packed), whole[start:]), rows
        assert same(kernels.linear(x[:rows], packed), whole[:rows]), rows
    assert same(rows_alone(lambda row: kernels.linear(row, packed), x[:40]), whole[:40])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_does_not_mind_strides_or_leading_dimensions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv1d = torch.randn(30, 97).to(dtype)  # GPT-2 keeps [in_features, out_features]
    packed = kernels.pack_linear(conv1d.T)
    plain = kernels.pack_linear(conv1d.T.contiguous())
    x = torch.randn(2, 30, 5).to(dtype).transpose(1, 2)
    result = kernels.linear(x, packed)
    assert result.shape == (2, 5, 97)
    assert result.dtype == dtype
    assert same(result, kernels.linear(x.contiguous(), plain))
    assert same(result[1, 3:4], kernels.linear(x[1, 3:4], packed))


def test_packing_copies_the_weight() -> None:
    weight = torch.randn(8, 8)
    packed = kernels.pack_linear(weight)
    before = kernels.linear(torch.ones(1, 8), packed)
    weight.zero_()
    assert same(kernels.linear(torch.ones(1, 8), packed), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES[:-1])
def test_a_weight_as_it_lies_gives_the_same_bits_in_any_company(
    in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
    x = torch.randn(140, in_features).to(dtype)
    unpacked = kernels.PackedLinear(weight=weight, bias=None, out_features=out_features, prepacked=False)
    transposed = weight.t().contiguous()
    batch = torch.stack([transposed, -transposed])
    functions = {
        "linear": lambda rows: kernels.linear(rows, unpacked),
        "unpacked_linear": lambda rows: (
            kernels.unpacked_linear(rows, weight, torch.ones(out_features, dtype=dtype)) - 1
        ),
        "matmul": lambda rows: kernels.matmul(rows, transposed),
        "batched matmul": lambda rows: kernels.matmul(rows.expand(2, -1, -1), batch)[0],
    }
    for name, function in functions.items():
        whole = function(x)
        torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, atol=0.05, rtol=0.05)
        for rows in ROWS:
            assert same(function(x[140 - rows :]), whole[140 - rows :]), (name, rows)
        assert same(rows_alone(function, x[:20]), whole[:20]), name


# Elementwise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 30, 97, 128, 576, 1543])
def test_elementwise_gives_an_element_the_same_bits_in_any_company(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(130, width) * 3).to(dtype)
    for function in (F.silu, F.gelu, torch.sigmoid, lambda y: F.gelu(y, approximate="tanh")):
        whole = kernels.elementwise(function, x)
        torch.testing.assert_close(whole.double(), function(x.double()), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for rows in ROWS:
            assert same(kernels.elementwise(function, x[130 - rows :]), whole[130 - rows :]), rows
        assert same(kernels.elementwise(function, torch.stack([x, x], -1)[..., 1]), whole)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 61])
def test_every_thread_of_an_elementwise_operator_gets_whole_vectors(threads: int) -> None:
    for size in [0, 1, 127, 128, 129, 32768, 32769, 65536, 99_999, 1_000_000, 1_234_567]:
        padded = kernels._aligned_size(size, threads)
        chunks = max(1, min(threads, -(-padded // kernels.GRAIN)))
        assert size <= padded < size + 2 * threads * kernels.VECTOR_BLOCK
        assert padded % (chunks * kernels.VECTOR_BLOCK) == 0


# Fused operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU, Activation.RELU], ids=lambda a: a.name
)
def test_gated_is_its_parts_in_any_company(dtype: torch.dtype, activation: Activation) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(97, 48).to(dtype) / 7 for _ in range(2))
    biases = [torch.randn(97).to(dtype) for _ in range(2)]
    function = {
        Activation.SILU: F.silu,
        Activation.GELU_TANH: lambda y: F.gelu(y, approximate="tanh"),
        Activation.GELU: F.gelu,
        Activation.RELU: F.relu,
    }[activation]
    x = torch.randn(140, 48).to(dtype)
    packed = kernels.pack_gated(gate, up, *biases)
    whole = kernels.gated(x, packed, activation)
    wide = [
        F.linear(x.double(), weight.double(), bias.double()) for weight, bias in zip((gate, up), biases, strict=True)
    ]
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(whole.double(), function(wide[0]) * wide[1], atol=tolerance, rtol=tolerance)
    for rows in ROWS:
        assert same(kernels.gated(x[140 - rows :], packed, activation), whole[140 - rows :]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "flags", [NormFlags(0), NormFlags.ROUND_FIRST, NormFlags.PLUS_ONE, NormFlags.LAYER_NORM], ids=str
)
@pytest.mark.parametrize("width", [16, 97, 576])
def test_norm_is_the_norm_in_any_company(dtype: torch.dtype, flags: NormFlags, width: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((140, width), (width,), (width,)))
    kept = x.clone()
    whole = kernels.norm(x, weight, bias, eps=1e-5, flags=flags)
    if flags == NormFlags.LAYER_NORM:
        expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    else:
        factor = weight.double() + (flags == NormFlags.PLUS_ONE)
        expected = x.double() * x.double().square().mean(-1, keepdim=True).add(1e-5).rsqrt() * factor + bias.double()
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    assert same(x, kept)
    for rows in ROWS:
        assert same(kernels.norm(x[140 - rows :], weight, bias, eps=1e-5, flags=flags), whole[140 - rows :]), rows
    assert same(kernels.norm(x.view(5, 28, width), weight, bias, eps=1e-5, flags=flags).view(140, width), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 20), (16, 0)])
def test_turn_norms_and_rotates_in_place_in_any_company(
    head_dim: int, rotary_dim: int, normed: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tokens = 70
    given = torch.randn(tokens, 8 * head_dim).to(dtype)
    weights = torch.randn(2, head_dim).to(dtype)
    angle = torch.randn(tokens, rotary_dim // 2)
    angle = angle.repeat_interleave(2, 1) if interleaved else torch.cat([angle, angle], 1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def turned(rows: slice) -> Tensor:
        """Queries, keys and values in one buffer, of which the values stay."""
        buffer = given[rows].clone()
        q, k, _ = (part.unflatten(1, (-1, head_dim)) for part in buffer.split([head_dim * n for n in (4, 2, 2)], 1))
        rotation = (cos[rows], sin[rows]) if rotary_dim else None
        norms = (weights[0], weights[1]) if normed else None
        kernels.turn(q, k, rotation, norms=norms, flags=NormFlags(0), eps=1e-5, interleaved=interleaved)
        return buffer

    expected = given.double().view(tokens, 8, head_dim).clone()
    if normed:
        scale = expected[:, :6].square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        expected[:, :6] *= scale * weights.double().repeat_interleave(torch.tensor([4, 2]), 0)
    part = expected[:, :6, :rotary_dim].clone()
    if interleaved:
        partner = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    else:
        partner = torch.cat([-part[..., rotary_dim // 2 :], part[..., : rotary_dim // 2]], -1)
    expected[:, :6, :rotary_dim] = part * cos.double()[:, None] + partner * sin.double()[:, None]

    whole = turned(slice(None))
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(whole.double(), expected.flatten(1), atol=tolerance, rtol=tolerance)
    assert same(whole[:, 6 * head_dim :], given[:, 6 * head_dim :])
    for rows in (1, 2, 3, 7, 33, 64):
        assert same(turned(slice(tokens - rows, None)), whole[tokens - rows :]), rows


def test_threads_that_are_released_end_and_come_back() -> None:
    x = torch.randn(1 << 18)
    threads = torch.get_num_threads()
    tasks = Path("/proc/self/task")
    torch.set_num_threads(4)
    try:
        before = x.exp()
        busy = len(list(tasks.iterdir()))
        for _ in range(2):
            release_threads()
            assert len(list(tasks.iterdir())) == busy - 3
        assert same(x.exp(), before)
        assert len(list(tasks.iterdir())) == busy
    finally:
        torch.set_num_threads(threads)


# Paged attention ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request's whole sequence; its last `new` tokens are in this step."""

    query: Tensor  # [tokens, query_heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor
    new: int

    def step(self, start: int, stop: int) -> "Request":
        """The request as it is when its tokens `start` to `stop` are computed."""
        return Request(query=self.query[:stop], key=self.key[:stop], value=self.value[:stop], new=stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What an attention layer fixes."""

    dtype: torch.dtype = torch.float32
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def request(self, tokens: int, new: int, seed: int) -> Request:
        generator = torch.Generator().manual_seed(seed)
        heads = (self.query_heads, self.kv_heads, self.kv_heads)
        query, key, value = (torch.randn(tokens, n, self.head_dim, generator=generator).to(self.dtype) for n in heads)
        return Request(query=query, key=key, value=value, new=new)

    def dense(self, request: Request) -> Tensor:
        """The naive result for the new tokens, float64 [new, query_heads, head_dim]."""
        tokens, groups = len(request.key), self.query_heads // self.kv_heads
        query = request.query[tokens - request.new :].double()
        key, value = (x.double().repeat_interleave(groups, 1) for x in (request.key, request.value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        row, column = torch.arange(tokens - request.new, tokens)[:, None], torch.arange(tokens)
        hidden = column > row
        if self.window is not None:
            hidden |= column <= row - self.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, request.new, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    def paged(self, requests: list[Request], *, page_size: int, strided: bool = False, garbage: float = 0.0) -> Tensor:
        """One step of all `requests` over a shuffled paged cache, packed: [new tokens, query_heads, head_dim]."""
        pages = [-(-len(request.key) // page_size) for request in requests]
        blocks = 1 + np.random.default_rng(0).permutation(sum(pages) + 3)
        tables = np.zeros((len(requests), max(pages)), np.int32)
        shape = (len(blocks) + 1, 3 if strided else 1, 2, page_size, self.kv_heads, self.head_dim)
        storage = torch.full(shape, garbage, dtype=self.dtype)
        storage[0] = 0
        key_cache, value_cache = storage[:, -1, 0], storage[:, -1, 1]
        for row, (request, count) in enumerate(zip(requests, pages, strict=True)):
            tables[row, :count], blocks = blocks[:count], blocks[count:]
            slots = torch.from_numpy(tables[row, :count, None].astype(np.int64) * page_size + np.arange(page_size))
            kernels.store_kv(request.key, request.value, key_cache, value_cache, slots.view(-1)[: len(request.key)])
            if self.window is not None:  # pages behind the window are handed back
                oldest = max(0, len(request.key) - request.new - self.window + 1)
                tables[row, : oldest // page_size] = 0
        plan = build_attention_plan(
            [request.new for request in requests],
            [len(request.key) for request in requests],
            tables,
            layout=KVLayout.of(key_cache),
            window=self.window,
        )
        query = torch.cat([request.query[len(request.query) - request.new :] for request in requests])
        return kernels.paged_attention(
            query, key_cache, value_cache, plan, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )


RAGGED = [
    (1, 1),
    (2, 2),
    (5, 1),
    (63, 1),
    (64, 1),
    (65, 1),
    (64, 64),
    (65, 33),
    (130, 2),
    (200, 31),
    (150, 150),
    (129, 1),
]


def batch(model: Model) -> list[Request]:
    return [model.request(tokens, new, seed) for seed, (tokens, new) in enumerate(RAGGED)]


MODELS = {
    "float32": Model(),
    "bfloat16": Model(dtype=torch.bfloat16),
    "float16": Model(dtype=torch.float16),
    "one head, 8 wide": Model(query_heads=1, kv_heads=1, head_dim=8),
    "10 wide": Model(head_dim=10),
    "one kv head": Model(query_heads=5, kv_heads=1, head_dim=24, dtype=torch.bfloat16),
    "no sharing": Model(query_heads=3, kv_heads=3, head_dim=80),
    "256 wide": Model(query_heads=4, kv_heads=2, head_dim=256, dtype=torch.bfloat16),
    "window 1": Model(window=1),
    "window 5": Model(window=5, dtype=torch.bfloat16),
    "window 64": Model(window=64),
    "window 100": Model(window=100, dtype=torch.float16),
    "softcap": Model(softcap=2.0),
    "sinks": Model(sinks=torch.tensor([-1.0, 0.0, 2.0, 30.0])),
    "everything": Model(
        query_heads=9,
        kv_heads=3,
        head_dim=64,
        dtype=torch.bfloat16,
        window=33,
        softcap=3.0,
        sinks=torch.linspace(-2, 4, 9),
    ),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request: pytest.FixtureRequest) -> Model:
    chosen: Model = request.param
    return chosen


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_attention_is_dense_attention(model: Model, page_size: int) -> None:
    requests = batch(model)
    expected = torch.cat([model.dense(request) for request in requests])
    result = model.paged(requests, page_size=page_size)
    assert result.dtype == model.dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[model.dtype], rtol=TOLERANCE[model.dtype])


def test_attention_has_the_same_bits_alone_and_among_others(model: Model) -> None:
    requests = batch(model)
    together = model.paged(requests, page_size=16).split([request.new for request in requests])
    for request, among_others in zip(requests, together, strict=True):
        assert same(model.paged([request], page_size=16), among_others)
    backwards = model.paged(requests[::-1], page_size=16).split([request.new for request in requests[::-1]])
    assert all(same(a, b) for a, b in zip(together, backwards[::-1], strict=True))


def test_attention_has_the_same_bits_in_any_chunks(model: Model) -> None:
    whole = model.request(170, 170, 0)
    expected = model.paged([whole], page_size=16)
    for size in (1, 2, 7, QUERY_TILE - 1, QUERY_TILE, KEY_TILE, 100):
        cuts = [whole.step(start, min(start + size, 170)) for start in range(0, 170, size)]
        assert same(torch.cat([model.paged([cut], page_size=16) for cut in cuts]), expected), size
        assert same(model.paged(cuts, page_size=16), expected), size


@pytest.mark.parametrize("page_size", [4, 5, 64, 100, 256])
def test_attention_has_the_same_bits_for_any_page_size(model: Model, page_size: int) -> None:
    requests = batch(model)
    assert same(model.paged(requests, page_size=page_size), model.paged(requests, page_size=16, strided=True))


def test_a_nan_stays_with_its_request_and_what_a_block_held_before_is_never_read(model: Model) -> None:
    requests = batch(model)
    clean = model.paged(requests, page_size=16).split([request.new for request in requests])
    poisoned = 6
    requests[poisoned].value[-1] = torch.nan
    requests[poisoned].key[-1] = torch.nan
    dirty = model.paged(requests, page_size=16, garbage=torch.nan).split([request.new for request in requests])
    assert dirty[poisoned].isnan().any()
    for index, (before, after) in enumerate(zip(clean, dirty, strict=True)):
        assert index == poisoned or same(before, after), index


@pytest.mark.parametrize("page_size", [16, 256])
def test_what_lies_behind_the_window_is_not_read(page_size: int) -> None:
    model = Model(window=5)
    request = model.request(130, 1, 0)
    clean = model.paged([request], page_size=page_size)
    request.key[:125] = torch.nan
    request.value[:125] = torch.nan
    assert same(model.paged([request], page_size=page_size), clean)


def test_slices_of_the_work_change_no_bits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = batch(model)
    expected = model.paged(requests, page_size=16)
    monkeypatch.setattr("chairlift.kernels.plan.SLICE_BYTES", 1)
    assert same(model.paged(requests, page_size=16), expected)


def test_plans_may_share_a_scratch() -> None:
    model = Model()
    cache = torch.zeros(9, 16, 2, 16)
    cache[1:] = torch.randn(8, 16, 2, 16)
    tables: npt.NDArray[np.int32] = np.arange(1, 9, dtype=np.int32)[None]
    scratch, results = Scratch(), []
    for shared in (scratch, scratch, None):
        for tokens in (100, 7, 128):
            plan = build_attention_plan([1], [tokens], tables, layout=KVLayout.of(cache), scratch=shared)
            query = torch.ones(1, 4, 16)
            results.append(kernels.paged_attention(query, cache, cache, plan, scale=model.scale))
    assert all(same(a, b) for a, b in zip(results[:3], results[3:6], strict=True))
    assert all(same(a, b) for a, b in zip(results[:3], results[6:], strict=True))


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([0], [4]), ([5], [4]), ([1, 1], [4])])
def test_a_plan_refuses_lengths_that_make_no_sense(query_lens: list[int], kv_lens: list[int]) -> None:
    layout = KVLayout.of(torch.zeros(2, 4, 2, 8))
    with pytest.raises(ValueError, match="1 <= query_lens <= kv_lens"):
        build_attention_plan(query_lens, kv_lens, np.ones((1, 1), np.int32), layout=layout)


def test_attention_refuses_a_query_the_plan_does_not_know() -> None:
    cache = torch.zeros(2, 4, 2, 8)
    plan = build_attention_plan([1], [1], np.ones((1, 1), np.int32), layout=KVLayout.of(cache))
    with pytest.raises(ValueError, match="plan is for 1 tokens, the query has 2"):
        kernels.paged_attention(torch.zeros(2, 4, 8), cache, cache, plan, scale=1.0)


def test_a_layout_refuses_rows_that_are_not_whole() -> None:
    with pytest.raises(ValueError, match="not whole rows of head_dim=8"):
        KVLayout.of(torch.zeros(2, 4, 2, 9)[..., :8])


# The table ----------------------------------------------------------------------------------------------------------


def test_there_is_a_table_for_the_cpu_and_none_for_what_is_not_written() -> None:
    assert ops_for(torch.device("cpu"), torch.bfloat16).store_kv is kernels.store_kv
    with pytest.raises(ValueError, match=r"no operators for torch\.float64 on cpu"):
        ops_for(torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match=r"no operators for torch\.float32 on meta"):
        ops_for(torch.device("meta"), torch.float32)
