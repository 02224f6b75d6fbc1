"""The C++ kernels from Python: structures of `csrc/chairlift.h`, operations built from tensors, and their eager run.

Refuses to know models and steps: who wants a program puts operations into an array of `ClOp` and runs it. Tensors are
rows of numbers, the last dimension contiguous; an operation holds addresses, so its tensors must outlive it.
"""

import ctypes
import logging
import mmap
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from chairlift.kernels import build

ABI = 3
ALIGNMENT = 64
UNIT = 16  # tokens and numbers that attention takes together: pages and heads are multiples of it
HUGE_PAGE = 2 << 20
CHUNK = 64 << 20  # bytes of the arena that are mapped at a time
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # a shared mapping gets no huge pages

logger = logging.getLogger(__name__)


class Code(IntEnum):
    EMBED = 0
    GATHER = 1
    ADD = 2
    SCALE = 3
    NORM = 4
    ADD_NORM = 5
    LINEAR = 6
    GATED = 7
    ACT = 8
    ROPE_STORE = 9
    ATTEND = 10
    SOFTCAP = 11
    ARGMAX = 12
    LARGEST = 13


class Rows(IntEnum):
    """How many rows an operation has: the step's tokens, or those that get logits."""

    TOKENS = 0
    LOGITS = 1


class Activation(IntEnum):
    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4


class NormFlags(IntFlag):
    LAYER_NORM = 1  # subtract the mean; without it RMS norm
    PLUS_ONE = 2  # the weight is stored as its difference from one
    ROUND_FIRST = 4  # round the normalised value to the dtype before the weight is applied


TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class ClOp(ctypes.Structure):
    _fields_: ClassVar = [
        ("code", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("p", ctypes.c_void_p * 8),
        ("n", ctypes.c_int64 * 12),
        ("f", ctypes.c_float * 2),
    ]


class ClGroup(ctypes.Structure):
    _fields_: ClassVar = [
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
    ]


class ClRequest(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_int32) for name in ("start", "count", "position", "table_row")]


class ClStep(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_tokens", ctypes.c_int64),
        ("num_logits", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("requests", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
    ]


_LAYOUT = struct.Struct("=4i8q12q2f")
_NO_POINTERS = [(0,) * (8 - used) for used in range(9)]
_NO_NUMBERS = [(0,) * (12 - used) for used in range(13)]
assert _LAYOUT.size == ctypes.sizeof(ClOp)


def operation(
    code: Code,
    dtype: torch.dtype,
    pointers: tuple[int, ...],
    numbers: tuple[int, ...],
    floats: tuple[float, float] = (0.0, 0.0),
    rows: Rows = Rows.TOKENS,
) -> ClOp:
    """An operation from addresses, sizes and strides in the order that `chairlift.h` gives."""
    return ClOp.from_buffer_copy(
        _LAYOUT.pack(
            code,
            TYPES[dtype],
            rows,
            0,
            *pointers,
            *_NO_POINTERS[len(pointers)],
            *numbers,
            *_NO_NUMBERS[len(numbers)],
            *floats,
        )
    )


def address_of(array: "ctypes.Array[Any]") -> int:
    """Where a ctypes array begins."""
    return ctypes.addressof(array)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A weight laid out for `linear`, or two for `gated`. Holds a copy: pack again when the weight changes."""

    data: Tensor  # uint8, aligned to 64 bytes
    bias: Tensor | None  # float32 [out_features], of `gated` [2 * out_features]: the gate's, then that of up
    dtype: torch.dtype
    in_features: int
    out_features: int


# Operations ---------------------------------------------------------------------------------------------------------
# x, y, residual, out: [rows, width]. Their dtype is that of the operation, and of weights.


def embed(table: Tensor, out: Tensor, *, scale: float = 1.0) -> ClOp:
    """out[i] = table[token_ids[i]] * scale; `table` [vocabulary, width], contiguous."""
    pointers, numbers = (table.data_ptr(), out.data_ptr()), (table.shape[1], out.stride(0))
    return operation(Code.EMBED, table.dtype, pointers, numbers, (scale, 0.0))


def gather(x: Tensor, out: Tensor) -> ClOp:
    """out[i] = x[keep[i]]; as many rows as the step has logits."""
    return _map(Code.GATHER, x, out, rows=Rows.LOGITS)


def add(x: Tensor, y: Tensor, out: Tensor, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = x + y."""
    pointers = (x.data_ptr(), y.data_ptr(), out.data_ptr())
    return operation(Code.ADD, x.dtype, pointers, (x.shape[1], x.stride(0), y.stride(0), out.stride(0)), rows=rows)


def scale(x: Tensor, out: Tensor, factor: float, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = x * factor."""
    return _map(Code.SCALE, x, out, number=factor, rows=rows)


def act(x: Tensor, out: Tensor, activation: Activation, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = activation(x)."""
    return _map(Code.ACT, x, out, activation, rows=rows)


def softcap(x: Tensor, out: Tensor, cap: float, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = cap * tanh(x / cap)."""
    return _map(Code.SOFTCAP, x, out, number=cap, rows=rows)


def argmax(x: Tensor, columns: Tensor, largest: Tensor, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """columns, int64 [rows], = where the largest of each row comes first; largest, float32 [rows], = what it is."""
    pointers = (x.data_ptr(), columns.data_ptr(), largest.data_ptr())
    return operation(Code.ARGMAX, x.dtype, pointers, (x.shape[1], x.stride(0)), rows=rows)


def _map(code: Code, x: Tensor, out: Tensor, *numbers: int, number: float = 0.0, rows: Rows) -> ClOp:
    pointers = (x.data_ptr(), out.data_ptr())
    return operation(code, x.dtype, pointers, (x.shape[1], x.stride(0), out.stride(0), *numbers), (number, 0.0), rows)


def norm(
    x: Tensor,
    weight: Tensor | None,  # [width]
    out: Tensor,
    *,
    bias: Tensor | None = None,  # [width]
    eps: float,
    flags: NormFlags,
    rows: Rows = Rows.TOKENS,
) -> ClOp:
    """out = the norm of each row of x, times weight, plus bias."""
    pointers = (x.data_ptr(), _address(weight), _address(bias), out.data_ptr())
    return operation(Code.NORM, x.dtype, pointers, (x.shape[1], x.stride(0), out.stride(0), flags), (eps, 0.0), rows)


def add_norm(
    x: Tensor,
    y: Tensor,
    total: Tensor,  # may be x or y
    weight: Tensor | None,  # [width]
    out: Tensor,
    *,
    bias: Tensor | None = None,  # [width]
    eps: float,
    flags: NormFlags,
    rows: Rows = Rows.TOKENS,
) -> ClOp:
    """total = x + y; out = the norm of total."""
    pointers = (x.data_ptr(), y.data_ptr(), total.data_ptr(), _address(weight), _address(bias), out.data_ptr())
    numbers = (x.shape[1], x.stride(0), y.stride(0), total.stride(0), out.stride(0), flags)
    return operation(Code.ADD_NORM, x.dtype, pointers, numbers, (eps, 0.0), rows)


def linear(x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = x W^T + bias, rounded, plus the residual, which may be `out` itself."""
    pointers = (x.data_ptr(), packed.data.data_ptr(), _address(packed.bias), out.data_ptr(), _address(residual))
    last = 0 if residual is None else residual.stride(0)
    numbers = (packed.in_features, packed.out_features, x.stride(0), out.stride(0), last)
    return operation(Code.LINEAR, packed.dtype, pointers, numbers, rows=rows)


def gated(x: Tensor, packed: Packed, out: Tensor, activation: Activation, *, rows: Rows = Rows.TOKENS) -> ClOp:
    """out = activation(x G^T) * (x U^T), with roundings as if done one by one."""
    pointers = (x.data_ptr(), packed.data.data_ptr(), _address(packed.bias), out.data_ptr())
    numbers = (packed.in_features, packed.out_features, x.stride(0), out.stride(0), activation)
    return operation(Code.GATED, packed.dtype, pointers, numbers, rows=rows)


def rope_store(
    q: Tensor,  # [tokens, q_heads * head_dim], rotated in place; rows may be far apart, heads are neighbours
    k: Tensor,  # [tokens, kv_heads * head_dim], rotated in place
    v: Tensor,  # [tokens, kv_heads * head_dim]
    rotation: tuple[Tensor, Tensor] | None,  # cos and sin [tokens, rotary_dim], or of all positions
    cache: Tensor,  # the layer's blocks
    *,
    head_dim: int,
    group: int,
    norms: tuple[Tensor, Tensor] | None = None,  # of each query and each key head [head_dim]
    flags: int = 0,  # NormFlags
    eps: float = 0.0,
    interleaved: bool = False,
    by_position: bool = False,  # cos and sin are tables of all positions
) -> ClOp:
    """Norm and rotate queries and keys in place, write keys and values to the pages."""
    cos, sin = rotation or (None, None)
    q_norm, k_norm = norms or (None, None)
    pointers = tuple(map(_address, (q, k, v, cos, sin, q_norm, k_norm, cache)))
    rotary_dim, cos_stride = (0, 0) if cos is None else (cos.shape[1], cos.stride(0))
    sizes = (q.shape[1] // head_dim, k.shape[1] // head_dim, head_dim, rotary_dim)
    numbers = (*sizes, q.stride(0), k.stride(0), v.stride(0), cos_stride, group, flags, interleaved, by_position)
    return operation(Code.ROPE_STORE, q.dtype, pointers, numbers, (eps, 0.0))


def attend(
    q: Tensor,  # [tokens, q_heads * head_dim]
    cache: Tensor,
    out: Tensor,  # [tokens, q_heads * head_dim]
    *,
    head_dim: int,
    kv_heads: int,
    group: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # float32 [q_heads]
) -> ClOp:
    """out = causal attention of each token over the pages of its request."""
    pointers = (q.data_ptr(), cache.data_ptr(), out.data_ptr(), _address(sinks))
    sizes = (q.shape[1] // head_dim, kv_heads, head_dim)
    numbers = (*sizes, q.stride(0), out.stride(0), group, window or 0)
    return operation(Code.ATTEND, q.dtype, pointers, numbers, (scale, softcap or 0.0))


class Native:
    """A loaded library: packs weights, runs operations and programs. One for each instruction set."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.cl_abi() != ABI:
            raise OSError(f"{path} has version {library.cl_abi()} of the interface, not {ABI}")
        self._library = library
        self._run = library.cl_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        library.cl_isa.restype = library.cl_error.restype = ctypes.c_char_p
        library.cl_packed_bytes.restype = library.cl_cache_elements.restype = ctypes.c_int64
        library.cl_packed_bytes.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        library.cl_cache_elements.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        shape: list[Any] = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        library.cl_pack.argtypes = [ctypes.c_int, ctypes.c_void_p, *shape]
        library.cl_pack_gated.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *shape]
        self.isa: str = library.cl_isa().decode()
        self.trace: Callable[[Any, ClStep], None] | None = None  # sees every operation before it runs

    def set_threads(self, threads: int) -> None:
        """Threads for what the calling thread runs from now on; 0: as many as OpenMP gives."""
        self._library.cl_set_threads(threads)

    def run(self, ops: "ClOp | ctypes.Array[ClOp]", num_ops: int, step: ClStep) -> None:
        """Run a program, an array of operations, for one step. Raises `ValueError` before anything was written."""
        if self.trace is not None:
            self.trace(ops, step)
        if code := self._run(ctypes.byref(ops), num_ops, ctypes.byref(step)):
            raise ValueError(f"the kernels refuse the program: {self._library.cl_error(code).decode()}")

    def cache_elements(self, dtype: torch.dtype, page_size: int, kv_heads: int, head_dim: int) -> int:
        """Numbers in a block of one layer's cache, keys and values together."""
        return int(self._library.cl_cache_elements(TYPES[dtype], page_size, kv_heads, head_dim))

    # Packing --------------------------------------------------------------------------------------------------------

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Lay out `weight` [out_features, in_features] with `bias` [out_features]."""
        return self._pack([weight], [bias])

    def pack_gated(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> Packed:
        """Lay out two weights [out_features, in_features] of one dtype together. They have biases both, or neither."""
        if gate.shape != up.shape or gate.dtype != up.dtype or (gate_bias is None) != (up_bias is None):
            raise ValueError(f"gate and up differ: {gate.dtype} {tuple(gate.shape)}, {up.dtype} {tuple(up.shape)}")
        return self._pack([gate, up], [gate_bias, up_bias])

    def _pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Packed:
        rows = [weight.detach() if weight.stride(1) == 1 else weight.detach().contiguous() for weight in weights]
        if len({weight.stride(0) for weight in rows}) > 1:
            rows = [weight.contiguous() for weight in rows]
        dtype, (out_features, in_features) = rows[0].dtype, rows[0].shape
        size = self._library.cl_packed_bytes(TYPES[dtype], out_features, in_features)
        data = _arena.take(size * len(rows))
        pack = self._library.cl_pack if len(rows) == 1 else self._library.cl_pack_gated
        addresses = [weight.data_ptr() for weight in rows]
        pack(TYPES[dtype], *addresses, rows[0].stride(0), out_features, in_features, data.data_ptr())
        parts = [bias.detach().float() for bias in biases if bias is not None]
        return Packed(
            data=data,
            bias=torch.cat(parts) if parts else None,
            dtype=dtype,
            in_features=in_features,
            out_features=out_features,
        )

    # Operations, run at once ----------------------------------------------------------------------------------------
    # [..., width] to [..., width]

    def linear(self, x: Tensor, packed: Packed, residual: Tensor | None = None) -> Tensor:
        """x W^T + bias (+ residual)."""
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0], packed.out_features)
        self._eager(linear(rows, packed, out, None if residual is None else _rows(residual)), rows.shape[0])
        return out.view(*x.shape[:-1], packed.out_features)

    def gated(self, x: Tensor, packed: Packed, activation: Activation) -> Tensor:
        """activation(x G^T) * (x U^T)."""
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0], packed.out_features)
        self._eager(gated(rows, packed, out, activation), rows.shape[0])
        return out.view(*x.shape[:-1], packed.out_features)

    def norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, eps: float, flags: NormFlags
    ) -> Tensor:
        """The norm of the last dimension, times weight, plus bias."""
        rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._eager(norm(rows, weight, _rows(out), bias=bias, eps=eps, flags=flags), rows.shape[0])
        return out

    def add_norm(
        self, x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, eps: float, flags: NormFlags
    ) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        total, out = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        rows = _rows(x)
        op = add_norm(rows, _rows(y), _rows(total), weight, _rows(out), bias=bias, eps=eps, flags=flags)
        self._eager(op, rows.shape[0])
        return total, out

    def embed(self, table: Tensor, token_ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """table[token_ids] * scale; `token_ids` int64 [n], which must be rows of the table."""
        out = table.new_empty(len(token_ids), table.shape[1])
        step = ClStep(num_tokens=len(token_ids), token_ids=token_ids.data_ptr())
        self.run(embed(table, out, scale=scale), 1, step)
        return out

    def gather(self, x: Tensor, keep: Tensor) -> Tensor:
        """x[keep]; `keep` int64 [n], which must be rows of x [rows, width]."""
        out = x.new_empty(len(keep), x.shape[1])
        self.run(gather(x, out), 1, ClStep(num_logits=len(keep), keep=keep.data_ptr()))
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, of one shape."""
        rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._eager(add(rows, _rows(y), _rows(out)), rows.shape[0])
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._eager(scale(rows, _rows(out), factor), rows.shape[0])
        return out

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(x)."""
        rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._eager(act(rows, _rows(out), activation), rows.shape[0])
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
        self._eager(softcap(rows, _rows(out), cap), rows.shape[0])
        return out

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, width] -> the first column of each row's largest number, int64, and that number, float32: NaN for a
        row with a NaN in it. [rows] each; `width` is at most 2^24."""
        rows = _rows(x)
        columns, largest = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
        self._eager(argmax(rows, columns, largest), len(rows))
        return columns, largest

    def largest(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """x [rows, width] -> its `count` (at most 1024) largest numbers, float32, largest first, and their columns,
        int64, of equal numbers the first ones. [rows, count] each. A row with a NaN in it has NaN as its first."""
        rows = _rows(x)
        values, columns = torch.empty(len(rows), count), torch.empty(len(rows), count, dtype=torch.int64)
        pointers, numbers = (
            (rows.data_ptr(), values.data_ptr(), columns.data_ptr()),
            (rows.shape[1], rows.stride(0), count),
        )
        self._eager(operation(Code.LARGEST, rows.dtype, pointers, numbers), len(rows))
        return values, columns

    def _eager(self, op: ClOp, num_rows: int) -> None:
        self.run(op, 1, ClStep(num_tokens=num_rows))


def _rows(x: Tensor) -> Tensor:
    """x [..., width] as [rows, width] with contiguous rows; a copy only where a view will not do."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _Arena:
    """Memory for packed weights, in huge pages where the system has them: reading all weights once, as one token does,
    otherwise spends a tenth of its time on address translation. A mapping is freed with the last weight in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: Callable[[], mmap.mmap | None] = lambda: None  # weakly: the tensors keep it alive
        self._next = 0  # offset of what is free in it

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to 64 bytes."""
        with self._lock:
            mapping = self._mapping()
            if mapping is None or self._next + size > len(mapping):
                mapping = mmap.mmap(-1, _round_up(max(size, CHUNK), HUGE_PAGE) + HUGE_PAGE, **PRIVATE)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    mapping.madvise(mmap.MADV_HUGEPAGE)
                self._mapping = weakref.ref(mapping)
                self._next = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE
            start = self._next
            self._next += _round_up(size, ALIGNMENT)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_arena = _Arena()


def load(isa: str) -> Native:
    """The kernels for `isa`, compiled if need be. Raises `BuildError`, or `OSError` when the library does not load."""
    return Native(build.build(isa))


@cache
def native() -> Native | None:
    """The kernels for this machine, or None, once with a warning that says why.

    Raises `ValueError` for a `CHAIRLIFT_ISA` that does not run here.
    """
    isa = build.chosen_isa()
    try:
        return load(isa)
    except (build.BuildError, OSError) as error:
        logger.warning("no native CPU kernels, PyTorch's operators serve instead (slower): %s", error)
        return None
