"""The C++ kernels, for every instruction set this machine runs: right against float64, same bits in any company."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels import build, reference
from chairlift.kernels import native as ops
from chairlift.kernels.native import Activation, ClOp, ClStep, Native, NormFlags, Packed, Rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
THREADS = [1, 2, 3, 4]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}
SHAPES = [(8, 8), (7, 5), (1, 16), (16, 1), (3, 47), (30, 97), (64, 32), (48, 128), (257, 100), (577, 961)]
WIDTHS = [1, 5, 16, 17, 63, 64, 100, 576, 1025, 5000]


@pytest.fixture(scope="module", params=build.supported_isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[Native]:
    loaded = ops.load(request.param)
    assert loaded.isa == request.param
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


def close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[actual.dtype] * factor
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def ragged(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows that are not neighbours, nor aligned to anything."""
    return torch.randn(rows, width + 3).to(dtype)[:, 1 : width + 1]


def weight(out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)


# Linear -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_linear(kernels: Native, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    w, x, residual = (
        weight(out_features, in_features, dtype),
        ragged(23, in_features, dtype),
        ragged(23, out_features, dtype),
    )
    bias = torch.randn(out_features).to(dtype)
    product = x.double() @ w.double().T
    close(kernels.linear(x, kernels.pack(w)), product)
    close(kernels.linear(x, kernels.pack(w, bias)), product + bias)
    close(kernels.linear(x, kernels.pack(w), residual), product + residual)
    close(kernels.linear(x, kernels.pack(w, bias), residual), product + bias + residual)


def test_linear_agrees_with_the_reference(kernels: Native, dtype: torch.dtype) -> None:
    w, x, bias = weight(961, 577, dtype), torch.randn(2, 9, 577).to(dtype), torch.randn(961).to(dtype)
    close(kernels.linear(x, kernels.pack(w, bias)), reference.linear(x, reference.pack_linear(w, bias)))


def test_linear_rounds_before_it_adds_the_residual(kernels: Native, dtype: torch.dtype) -> None:
    w, x, residual = weight(50, 40, dtype), ragged(5, 40, dtype), ragged(5, 50, dtype)
    packed = kernels.pack(w)
    assert same(kernels.linear(x, packed, residual), kernels.linear(x, packed) + residual)


@pytest.mark.parametrize("gated", [False, True])
def test_rows_have_the_same_bits_in_any_company(kernels: Native, dtype: torch.dtype, gated: bool) -> None:
    in_features, out_features = 67, 101
    w, bias = weight(out_features, in_features, dtype), torch.randn(out_features)
    x = ragged(512, in_features, dtype)
    packed = kernels.pack_gated(w, w.flip(0), bias, bias) if gated else kernels.pack(w, bias)

    def run(rows: Tensor) -> Tensor:
        return kernels.gated(rows, packed, Activation.SILU) if gated else kernels.linear(rows, packed)

    whole = run(x)
    for threads in THREADS:
        kernels.set_threads(threads)
        for rows in [*range(1, 71), 128, 255, 256, 300, 385, 512]:  # from 128 a thread on each has rows of its own
            part = slice(rows) if rows % 2 else slice(-rows, None)
            assert same(run(x[part]), whole[part]), (threads, rows)
    kernels.set_threads(0)


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 576)])
def test_rows_of_a_real_shape_have_the_same_bits(
    kernels: Native, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    packed, x = kernels.pack(weight(out_features, in_features, dtype)), ragged(140, in_features, dtype)
    whole = kernels.linear(x, packed)
    for rows in (1, 2, 3, 8, 9, 31, 64, 129):
        assert same(kernels.linear(x[5 : 5 + rows], packed), whole[5 : 5 + rows]), rows


def test_linear_takes_weights_of_any_strides(kernels: Native, dtype: torch.dtype) -> None:
    w, x = weight(33, 21, dtype), ragged(4, 21, dtype)
    expected = kernels.linear(x, kernels.pack(w))
    wide = torch.zeros(33, 50, dtype=dtype)
    wide[:, 7:28] = w
    assert same(kernels.linear(x, kernels.pack(wide[:, 7:28])), expected)
    assert same(kernels.linear(x, kernels.pack(w.T.contiguous().T)), expected)
    assert same(kernels.linear(x.T.contiguous().T, kernels.pack(w)), expected)


def test_linear_reads_nothing_beside_its_rows(kernels: Native, dtype: torch.dtype) -> None:
    """What lies behind a row of odd length, and behind the last row, is another's."""
    w, padded = weight(20, 33, dtype), torch.full((6, 34), float("nan"), dtype=dtype)
    padded[:, :33] = torch.randn(6, 33)
    out = torch.full((6, 50), 7.0, dtype=dtype)
    packed = kernels.pack(w)
    kernels.run(ops.linear(padded[:, :33], packed, out[:, :20]), 1, ClStep(num_tokens=6))
    close(out[:, :20], padded[:, :33].double() @ w.double().T)
    assert (out[:, 20:] == 7.0).all()


def test_residual_may_be_the_output(kernels: Native, dtype: torch.dtype) -> None:
    w, x, residual = weight(100, 30, dtype), ragged(70, 30, dtype), ragged(70, 100, dtype)
    packed = kernels.pack(w)
    expected = kernels.linear(x, packed, residual)
    kernels.run(ops.linear(x, packed, residual, residual), 1, ClStep(num_tokens=70))
    assert same(residual, expected)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("in_features", "out_features"), [(7, 5), (30, 97), (64, 48), (100, 200)])
def test_gated(
    kernels: Native, dtype: torch.dtype, in_features: int, out_features: int, activation: Activation
) -> None:
    gate, up = weight(out_features, in_features, dtype), weight(out_features, in_features, dtype)
    x, biases = ragged(11, in_features, dtype), torch.randn(2, out_features)
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    function = ACTIVATIONS[activation]
    close(kernels.gated(x, kernels.pack_gated(gate, up), activation), function(g) * u, 2)
    packed = kernels.pack_gated(gate, up, *biases)
    close(kernels.gated(x, packed, activation), function(g + biases[0]) * (u + biases[1]), 2)


def test_gated_has_the_roundings_of_its_parts(kernels: Native, dtype: torch.dtype) -> None:
    gate, up, x = weight(100, 60, dtype), weight(100, 60, dtype), ragged(9, 60, dtype)
    g, u = kernels.linear(x, kernels.pack(gate)), kernels.linear(x, kernels.pack(up))
    together = kernels.gated(x, kernels.pack_gated(gate, up), Activation.SILU)
    assert same(together, kernels.act(g, Activation.SILU) * u)


# Elementwise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise(kernels: Native, dtype: torch.dtype, width: int) -> None:
    x, y = ragged(7, width, dtype), ragged(7, width, dtype)
    assert same(kernels.add(x, y), x + y)
    assert same(kernels.scale(x, 0.5), x * 0.5)
    close(kernels.softcap(x * 20, 30.0), 30 * torch.tanh(x.double() * 20 / 30), 30)
    for activation, function in ACTIVATIONS.items():
        close(kernels.act(x * 4, activation), function(x.double() * 4), 2)


@pytest.mark.parametrize("width", [*WIDTHS, 512, 513, 1600])
def test_argmax_is_the_first_of_the_largest(kernels: Native, dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(9, width + 3) * 3).round().to(dtype)[:, 1 : width + 1]  # many are equal
    x[1], x[2] = -torch.inf, 0.0
    x[3, width // 2] = torch.inf
    columns, largest = kernels.argmax(x)
    expected = x.float().max(-1)
    assert torch.equal(columns, expected.indices)
    assert torch.equal(largest, expected.values)
    for place in {0, width // 3, width - 1}:
        x[4:6] = -torch.inf
        x[4, place] = torch.nan
        assert kernels.argmax(x)[1].isnan().nonzero().tolist() == [[4]]
    x[4] = torch.nan
    assert 0 <= int(kernels.argmax(x)[0][4]) < width, "means nothing, but is a column"


@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (5, 5), (64, 64), (300, 64), (1025, 256), (5000, 1024), (49152, 64)]
)
def test_largest(kernels: Native, dtype: torch.dtype, width: int, count: int) -> None:
    x = torch.randn(9, width + 3).to(dtype)[:, 1 : width + 1]
    x[1], x[2] = 0.0, -torch.inf
    x[3, count // 2 :] = -torch.inf
    x[4, -1] = torch.inf
    x[5] = (x[5] * 2).round()
    values, columns = kernels.largest(x, count)
    expected = [sorted(range(width), key=lambda i, row=row: (-row[i], i))[:count] for row in x.tolist()]  # type: ignore[misc]
    assert columns.tolist() == expected
    assert torch.equal(values, x.float().gather(1, columns))
    x[6, width // 2] = torch.nan
    values, columns = kernels.largest(x[6:8], count)
    assert values[0, 0].isnan()
    assert columns[1].tolist() == expected[7]


def test_embed_and_gather(kernels: Native, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 77).to(dtype), torch.tensor([3, 49, 0, 3, 7])
    assert same(kernels.embed(table, ids), table[ids])
    assert same(kernels.embed(table, ids, scale=8.5), (table[ids].float() * 8.5).to(dtype))
    assert same(kernels.gather(table, ids), table[ids])


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU, Activation.GELU_TANH])
def test_activations_far_out(kernels: Native, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([0.0, 1e-8, -1e-8, 1e30, -1e30])])[None]
    expected = ACTIVATIONS[activation](x.double())
    torch.testing.assert_close(kernels.act(x, activation).double(), expected, atol=2e-7, rtol=2e-6)
    assert kernels.act(torch.tensor([[float("nan"), float("inf")]]), activation).isnan().tolist() == [[True, False]]


def test_tanh_is_accurate_near_zero(kernels: Native) -> None:
    x = torch.logspace(-20, 2, 2000)[None]
    for signed in (x, -x):
        torch.testing.assert_close(kernels.softcap(signed, 1.0).double(), signed.double().tanh(), atol=0, rtol=4e-7)


# Norms --------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * w


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(kernels: Native, dtype: torch.dtype, width: int) -> None:
    x, w, b = ragged(9, width, dtype), torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    wide = [tensor.double() for tensor in (x, w, b)]
    expected = rms_norm(wide[0], wide[1], 1e-5)
    close(kernels.norm(x, w, eps=1e-5, flags=NormFlags(0)), expected, 2)
    close(kernels.norm(x, w, eps=1e-5, flags=NormFlags.ROUND_FIRST), expected, 2)
    close(kernels.norm(x, None, eps=1e-5, flags=NormFlags(0)), rms_norm(wide[0], torch.ones(width), 1e-5))
    close(kernels.norm(x, w, eps=1e-5, flags=NormFlags.PLUS_ONE), rms_norm(wide[0], 1 + wide[1], 1e-5), 2)
    layer_norm = F.layer_norm(wide[0], (width,), wide[1], wide[2], 1e-5)
    if width > 1:  # of one number it is 0 / 0
        close(kernels.norm(x, w, b, eps=1e-5, flags=NormFlags.LAYER_NORM), layer_norm, 2)


def test_norm_rounds_first_where_told(kernels: Native, dtype: torch.dtype) -> None:
    x, w = ragged(9, 576, dtype), torch.randn(576).to(dtype)
    plain = kernels.norm(x, None, eps=1e-6, flags=NormFlags(0))
    assert same(kernels.norm(x, w, eps=1e-6, flags=NormFlags.ROUND_FIRST), plain * w)


@pytest.mark.parametrize("width", [5, 576, 1025])
def test_add_norm_is_add_then_norm(kernels: Native, dtype: torch.dtype, width: int) -> None:
    x, y, w = ragged(40, width, dtype), ragged(40, width, dtype), torch.randn(width).to(dtype)
    total, normed = kernels.add_norm(x, y, w, eps=1e-5, flags=NormFlags.ROUND_FIRST)
    assert same(total, x + y)
    assert same(normed, kernels.norm(total, w, eps=1e-5, flags=NormFlags.ROUND_FIRST))


@pytest.mark.parametrize("width", [5, 576, 5000])
def test_rows_of_norms_and_activations_have_the_same_bits(kernels: Native, dtype: torch.dtype, width: int) -> None:
    x, w = ragged(70, width, dtype), torch.randn(width).to(dtype)
    runs: list[Callable[[Tensor], Tensor]] = [
        lambda rows: kernels.norm(rows, w, eps=1e-5, flags=NormFlags(0)),
        lambda rows: kernels.norm(rows, w, w, eps=1e-5, flags=NormFlags.LAYER_NORM),
        lambda rows: kernels.act(rows, Activation.GELU),
        lambda rows: kernels.softcap(rows, 2.0),
    ]
    for run in runs:
        whole = run(x)
        for threads in THREADS:
            kernels.set_threads(threads)
            for rows in (1, 2, 3, 8, 33, 70):
                assert same(run(x[-rows:]), whole[-rows:]), (threads, rows)
    kernels.set_threads(0)


# Programs -----------------------------------------------------------------------------------------------------------


class Block:
    """A small feed-forward model over static buffers, as a program."""

    def __init__(self, kernels: Native, rows: int) -> None:
        torch.manual_seed(1)
        self.kernels = kernels
        self.table, self.norm = torch.randn(40, 60), torch.randn(60)
        self.gate_up = kernels.pack_gated(weight(90, 60, torch.float32), weight(90, 60, torch.float32))
        self.down, self.head = kernels.pack(weight(60, 90, torch.float32)), kernels.pack(self.table)
        self.x, self.normed = torch.zeros(rows, 60), torch.zeros(rows, 60)
        self.hidden, self.kept, self.logits = torch.zeros(rows, 90), torch.zeros(rows, 60), torch.zeros(rows, 40)
        layer = [
            ops.norm(self.x, self.norm, self.normed, eps=1e-5, flags=NormFlags.ROUND_FIRST),
            ops.gated(self.normed, self.gate_up, self.hidden, Activation.SILU),
            ops.linear(self.hidden, self.down, self.x, self.x),
        ]
        last = [ops.gather(self.x, self.kept), ops.linear(self.kept, self.head, self.logits, rows=Rows.LOGITS)]
        program = [ops.embed(self.table, self.x), *layer, *layer, *layer, *last]
        self.program = (ClOp * len(program))(*program)

    def run(self, token_ids: Tensor, keep: Tensor) -> Tensor:
        step = ClStep(
            num_tokens=len(token_ids), num_logits=len(keep), token_ids=token_ids.data_ptr(), keep=keep.data_ptr()
        )
        self.kernels.run(self.program, len(self.program), step)
        return self.logits[: len(keep)].clone()

    def eager(self, token_ids: Tensor, keep: Tensor) -> Tensor:
        x = self.kernels.embed(self.table, token_ids)
        for _ in range(3):
            normed = self.kernels.norm(x, self.norm, eps=1e-5, flags=NormFlags.ROUND_FIRST)
            x = self.kernels.linear(self.kernels.gated(normed, self.gate_up, Activation.SILU), self.down, x)
        return self.kernels.linear(self.kernels.gather(x, keep), self.head)


@pytest.mark.parametrize("threads", THREADS)
def test_a_program_does_what_its_operations_do(kernels: Native, threads: int) -> None:
    block = Block(kernels, 64)
    for tokens in (1, 2, 7, 64):
        ids, keep = torch.arange(tokens) % 40, torch.arange(0, tokens, 3)
        kernels.set_threads(threads)
        result = block.run(ids, keep)
        kernels.set_threads(1)
        assert same(result, block.eager(ids, keep)), tokens
    kernels.set_threads(0)


def test_programs_run_on_several_python_threads(kernels: Native) -> None:
    def work(seed: int) -> bool:
        block, ids = Block(kernels, 16), torch.arange(16) * (seed + 1) % 40
        expected = block.eager(ids, ids.flip(0) % 16)
        return all(same(block.run(ids, ids.flip(0) % 16), expected) for _ in range(20))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))


def test_a_step_without_logits(kernels: Native) -> None:
    block = Block(kernels, 8)
    assert block.run(torch.arange(8), torch.arange(0)).shape == (0, 40)
    assert kernels.linear(torch.empty(0, 60), block.head).shape == (0, 40)


def test_bad_programs_are_refused_before_anything_is_written(kernels: Native) -> None:
    x, out = torch.ones(2, 8), torch.zeros(2, 8)
    good = ops.scale(x, out, 2.0)
    cases = {"unknown operation": ("code", 99), "unknown number type": ("type", 7)}
    for message, (field, value) in cases.items():
        bad = ClOp.from_buffer_copy(good)
        setattr(bad, field, value)
        with pytest.raises(ValueError, match=message):
            kernels.run((ClOp * 2)(good, bad), 2, ClStep(num_tokens=2))
    bad = ClOp.from_buffer_copy(good)
    bad.p[1] = None
    with pytest.raises(ValueError, match="null"):
        kernels.run((ClOp * 2)(good, bad), 2, ClStep(num_tokens=2))
    bad = ClOp.from_buffer_copy(good)
    bad.n[0] = 0
    with pytest.raises(ValueError, match="size"):
        kernels.run((ClOp * 2)(good, bad), 2, ClStep(num_tokens=2))
    assert (out == 0).all()


def test_packing_two_weights_that_differ_is_refused(kernels: Native) -> None:
    with pytest.raises(ValueError, match=r"gate and up differ: torch.float32 \(3, 4\), torch.float32 \(3, 5\)"):
        kernels.pack_gated(torch.ones(3, 4), torch.ones(3, 5))


def test_packed_weights_are_aligned(kernels: Native, dtype: torch.dtype) -> None:
    packed: list[Packed] = [kernels.pack(weight(n, 9, dtype)) for n in (1, 5, 50)]
    assert all(each.data.data_ptr() % ops.ALIGNMENT == 0 for each in packed)


def test_packed_weights_lie_apart_and_give_their_memory_back() -> None:
    arena = ops._Arena()
    sizes = (1, 64, 1000, ops.CHUNK, 7)
    taken = [arena.take(size) for size in sizes]
    for number, each in enumerate(taken):
        each.fill_(number)
    assert [each.numel() for each in taken] == list(sizes)
    assert all(bool((each == number).all()) for number, each in enumerate(taken))
    last = weakref.ref(arena._mapping())
    del taken[:-1], each
    assert last() is not None
    taken.clear()
    assert last() is None


def test_there_is_one_openmp_library(kernels: Native) -> None:
    assert len(build.loaded_openmp_libraries()) == 1
