"""Capture of a model's forward pass as a program of the C++ kernels, and its replay in one call.

A capture runs the shadow once on a few tokens and notes every kernel operation and every PyTorch operation between
them. If each of the latter has a counterpart among the kernels, the pass is a program over buffers of its own; if not,
the model stays with the eager path. Knows operations and addresses; knows no architecture.

T: tokens of a step, R: those that get logits.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.kernels import Native, native
from chairlift.kernels.native import ClOp, ClStep, Code, Rows
from chairlift.model.layers import RopeTable
from chairlift.model.loader import Shadow

aten = torch.ops.aten

CAPTURED_TOKENS, CAPTURED_LOGITS = 7, 3  # they differ, so that it shows which of the two a tensor has as its rows
WRITES = {  # which pointers an operation writes to
    Code.EMBED: (1,),
    Code.GATHER: (1,),
    Code.ADD: (2,),
    Code.SCALE: (1,),
    Code.NORM: (3,),
    Code.ADD_NORM: (2, 5),
    Code.LINEAR: (3,),
    Code.GATED: (3,),
    Code.ACT: (1,),
    Code.ROPE_STORE: (0, 1),
    Code.ATTEND: (2,),
    Code.SOFTCAP: (1,),
}
NO_WORK = {  # they allocate, or look at memory in another way
    aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided,
    aten.view, aten._unsafe_view, aten.reshape, aten.transpose, aten.t, aten.permute, aten.unsqueeze, aten.squeeze,
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.chunk, aten.expand, aten.detach, aten.alias,
}  # fmt: skip


Best = tuple[NDArray[np.int64], NDArray[np.float32]]  # of each row: the most likely token and its logit


class NotCapturableError(Exception):
    """The pass does something that has no counterpart among the kernels."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that operations of the pass write to, and that lives from `first` to `last` of them; -1 is before them."""

    address: int
    num_bytes: int
    rows: Rows = Rows.TOKENS
    first: int | None = None
    last: int | None = None

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // (CAPTURED_TOKENS if self.rows is Rows.TOKENS else CAPTURED_LOGITS)


class Capture(TorchDispatchMode):
    """Notes the operations of one pass."""

    def __init__(self, token_ids: Tensor, keep: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[ClOp] = []
        self.buffers: dict[int, Buffer] = {}  # by address; only memory that the pass has written to, or its inputs
        self.inputs: list[tuple[RopeTable, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._alive: list[Tensor] = []  # so that no address comes twice
        self._token_ids = token_ids
        self._keep = keep
        self._looking_away = False

    # ------------------------------------------------------------------ what is seen

    def note_kernel(self, op: ClOp, step: ClStep) -> None:
        """A kernel is about to run."""
        noted = ClOp.from_buffer_copy(op)
        if step.num_tokens == CAPTURED_LOGITS:
            noted.rows = Rows.LOGITS
        self._append(noted)

    def _append(self, op: ClOp) -> None:
        self.ops.append(op)
        for index in WRITES[Code(op.code)]:
            tensor = next((t for t in self._alive if _begin(t) <= op.p[index] < _begin(t) + _size(t)), None)
            if tensor is None:
                raise NotCapturableError("an operation writes to memory that the pass did not allocate")
            self.buffers.setdefault(_begin(tensor), Buffer(_begin(tensor), _size(tensor), Rows(op.rows)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive += [made for made in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(made, Tensor)]
        if self._looking_away or func.overloadpacket in NO_WORK:
            return out
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        is_constant = not any(self._is_ours(tensor) for tensor in tensors) and func.overloadpacket is not aten.embedding
        if is_constant or any(_begin(tensor) == _begin(out) for tensor in tensors):
            return out
        counterpart = COUNTERPARTS.get(func.overloadpacket)
        op = counterpart(self, out, *args, **(kwargs or {})) if counterpart else None
        if op is None:
            raise NotCapturableError(f"{func} has no counterpart among the kernels")
        op.rows = Rows.TOKENS if _rows(out).shape[0] == CAPTURED_TOKENS else Rows.LOGITS
        self._append(op)
        return out

    def _is_ours(self, tensor: Tensor) -> bool:
        return _begin(tensor) in self.buffers

    def look_away_at(self, rope: RopeTable) -> Callable[..., Any]:
        """`rope.forward`, whose results are inputs of the program."""
        forward = type(rope).forward

        def watched(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._looking_away = True
            out = forward(rope, x, position_ids, *args, **kwargs)
            tensors = [tensor.contiguous() for tensor in out]
            self._looking_away = False
            for tensor in tensors:
                self.buffers[_begin(tensor)] = Buffer(_begin(tensor), _size(tensor), first=-1)
            self.inputs.append((rope, args, kwargs, tensors))
            self._alive += tensors
            return tuple(tensors)

        return watched

    # ------------------------------------------------------------------ counterparts of PyTorch's operations

    def embedding(self, out: Tensor, weight: Tensor, indices: Tensor, *unused: Any, **others: Any) -> ClOp | None:
        if _begin(indices) != _begin(self._token_ids) or not weight.is_contiguous():
            return None
        return native.embed(weight, _rows(out))

    def add(self, out: Tensor, x: Any, y: Any, alpha: float = 1) -> ClOp | None:
        if alpha != 1 or not (isinstance(y, Tensor) and self._is_ours(y) and self._is_ours(x) and x.shape == y.shape):
            return None
        return native.add(_rows(x), _rows(y), _rows(out))

    def multiply(self, out: Tensor, x: Any, y: Any) -> ClOp | None:
        if isinstance(y, Tensor) and self._is_ours(y):
            x, y = y, x
        if isinstance(y, Tensor) and (y.numel() != 1 or self._is_ours(y)):
            return None
        return native.scale(_rows(x), _rows(out), float(y))

    def index(self, out: Tensor, x: Tensor, indices: list[Tensor | None]) -> ClOp | None:
        chosen = [i for i in indices if i is not None]
        if len(chosen) != 1 or _begin(chosen[0]) != _begin(self._keep) or x.dim() != 3:
            return None
        return native.gather(_rows(x), _rows(out))


COUNTERPARTS: dict[Any, Callable[..., ClOp | None]] = {
    aten.embedding: Capture.embedding,
    aten.add: Capture.add,
    aten.mul: Capture.multiply,
    aten.index: Capture.index,
}


def _begin(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise NotCapturableError("a matrix in oneDNN's layout is multiplied, which only PyTorch can read")
    return tensor.untyped_storage().data_ptr()


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _rows(tensor: Tensor) -> Tensor:
    """[..., width] as a view [rows, width]."""
    return tensor.view(-1, tensor.shape[-1])


class Program:
    """A captured pass over buffers for up to `max_tokens` tokens and `max_logits` logits."""

    def __init__(self, kernels: Native, capture: Capture, logits: Tensor, max_tokens: int, max_logits: int) -> None:
        self.max_tokens = max_tokens
        self.max_logits = max_logits
        self._kernels = kernels
        ops = _join_residuals(capture.ops, logits)
        buffer_at = _finder(capture.buffers)
        _set_lifetimes(ops, buffer_at)
        capture.buffers[_begin(logits)].last = len(ops)
        self._memory, moved = _place(capture.buffers, max_tokens, max_logits)
        uses: dict[int, list[tuple[int, int]]] = {}  # of a buffer: numbers of operations and pointers
        for number, op in enumerate(ops):
            for index, address in enumerate(op.p):
                if (buffer := buffer_at(address)) is not None:
                    uses.setdefault(buffer.address, []).append((number, index))
                    op.p[index] = moved[buffer.address].data_ptr() + address - buffer.address
        self._logits = self._typed(moved[_begin(logits)], logits, max_logits)
        self._views: dict[int, Tensor] = {}  # of it, by their rows: after a step PyTorch's code is in no cache
        best = torch.empty(max_logits, dtype=torch.int64), torch.empty(max_logits)
        ops.append(native.argmax(self._logits, *best, rows=Rows.LOGITS))
        self._best = best[0].numpy(), best[1].numpy()
        self._ops = (ClOp * len(ops))(*ops)
        self.num_ops = len(ops)
        self._turns = [
            Turn(rope, args, kwargs, [self._turned(t, moved, uses, max_tokens) for t in tensors])
            for rope, args, kwargs, tensors in capture.inputs
        ]

    def _turned(
        self, tensor: Tensor, moved: dict[int, Tensor], uses: dict[int, list[tuple[int, int]]], max_tokens: int
    ) -> "Turned":
        begin = _begin(tensor)
        buffer = self._typed(moved[begin], tensor, max_tokens)
        return Turned(buffer, [(self._ops[number], index) for number, index in uses.get(begin, [])])

    @staticmethod
    def _typed(memory: Tensor, like: Tensor, rows: int) -> Tensor:
        width = like.shape[-1]
        return memory[: rows * width * like.dtype.itemsize].view(like.dtype).view(rows, width)

    def run(
        self, step: ClStep, token_ids: Tensor, position_ids: Tensor, keep: Tensor, max_length: int
    ) -> tuple[Tensor, Best]:
        """Logits [R, vocab], and the best of each row as `Native.argmax` has them; all valid until the next run.

        max_length: positions are below it.
        """
        for turn in self._turns:
            turn.prepare(self._logits, position_ids, max_length)
        step.token_ids, step.keep = token_ids.data_ptr(), keep.data_ptr()
        self._kernels.run(self._ops, self.num_ops, step)
        count = len(keep)
        if (logits := self._views.get(count)) is None:
            logits = self._views[count] = self._logits[:count]
        tokens, largest = self._best
        return logits, (tokens[:count], largest[:count])


class Turned(NamedTuple):
    """Cosines or sines: a buffer for them, and the operations and which of their pointers read them."""

    buffer: Tensor
    uses: list[tuple[ClOp, int]]

    @property
    def may_move(self) -> bool:
        """Whether all who read them can read them in a table of all positions."""
        begin = self.buffer.data_ptr()
        return all(op.code == Code.ROPE_STORE and index in (3, 4) and op.p[index] == begin for op, index in self.uses)

    def move(self, table: Tensor, by_position: bool) -> None:
        """table: [rows, rotary_dim]."""
        for op, index in self.uses:
            op.p[index], op.n[7], op.n[11] = table.data_ptr(), table.stride(0), by_position


class Turn:
    """The cosines and sines that operations of a program read: where the rotary embedding keeps them for all positions,
    or in buffers of the program, a row for each token."""

    def __init__(self, rope: RopeTable, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[Turned]) -> None:
        self._rope, self._args, self._kwargs = rope, args, kwargs
        self._parts = parts
        self._may_move = all(part.may_move for part in parts)
        self._tables: tuple[Tensor, ...] = ()  # that the operations read; none: the buffers

    def prepare(self, like: Tensor, position_ids: Tensor, max_length: int) -> None:
        """Let the operations find what belongs to these positions, which are below `max_length`."""
        rope = self._rope
        if self._may_move and rope.regimes is None:
            tables = rope.rows(like, max_length, self._args, self._kwargs)
            if self._tables is not tables:
                self._move([table[0] for table in tables], by_position=True)
                self._tables = tables
            return
        if self._tables:
            self._move([part.buffer for part in self._parts], by_position=False)
            self._tables = ()
        turned = rope(like, position_ids[None], *self._args, **self._kwargs)
        for part, value in zip(self._parts, turned, strict=True):
            part.buffer[: len(position_ids)] = value[0]

    def _move(self, tables: list[Tensor], by_position: bool) -> None:
        for part, table in zip(self._parts, tables, strict=True):
            part.move(table, by_position)


def _join_residuals(ops: list[ClOp], logits: Tensor) -> list[ClOp]:
    """A linear layer whose result is only added to something becomes one operation with a residual."""
    joined: list[ClOp] = []
    uses: dict[int, int] = {}
    for op in ops:
        for address in {address for address in op.p if address is not None}:
            uses[address] = uses.get(address, 0) + 1
    for op in ops:
        before = joined[-1] if joined else None
        if before is not None and before.code == Code.LINEAR and op.code == Code.ADD and before.p[4] is None:
            made = before.p[3]
            other = op.p[0] if op.p[1] == made else op.p[1] if op.p[0] == made else None
            if other is not None and other != made and uses[made] == 2 and made != logits.data_ptr():
                before.p[4], before.n[4] = other, op.n[1] if other == op.p[0] else op.n[2]
                before.p[3], before.n[3] = op.p[2], op.n[3]
                continue
        joined.append(op)
    return joined


def _finder(buffers: dict[int, Buffer]) -> Callable[[int | None], Buffer | None]:
    """What finds the buffer that an address lies in."""
    starts = sorted(buffers)

    def buffer_at(address: int | None) -> Buffer | None:
        if address is None:
            return None
        buffer = buffers[starts[max(bisect_right(starts, address) - 1, 0)]]
        return buffer if buffer.address <= address < buffer.address + buffer.num_bytes else None

    return buffer_at


def _set_lifetimes(ops: list[ClOp], buffer_at: Callable[[int | None], Buffer | None]) -> None:
    for number, op in enumerate(ops):
        for address in op.p:
            if (buffer := buffer_at(address)) is not None:
                buffer.first = number if buffer.first is None else buffer.first
                buffer.last = number


def _place(buffers: dict[int, Buffer], max_tokens: int, max_logits: int) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Memory for every buffer; those whose lives do not overlap share it. Inputs live from the start."""
    memory: list[Tensor] = []
    free: list[tuple[int, Tensor]] = []  # (operation after which it is free, memory)
    placed: dict[int, Tensor] = {}
    for first, last, buffer in _in_order(buffers.values()):
        size = buffer.row_bytes * (max_tokens if buffer.rows is Rows.TOKENS else max_logits)
        fitting = [entry for entry in free if entry[0] < first and entry[1].numel() >= size]
        if fitting:
            entry = min(fitting, key=lambda e: e[1].numel())
            free = [other for other in free if other is not entry]
            placed[buffer.address] = entry[1]
        else:
            placed[buffer.address] = torch.empty(size, dtype=torch.uint8)
            memory.append(placed[buffer.address])
        free.append((last, placed[buffer.address]))
    return memory, placed


def _in_order(buffers: Iterable[Buffer]) -> list[tuple[int, int, Buffer]]:
    """(first, last, buffer) of those that are used, by the start of their lives."""
    used = [(b.first, b.last, b) for b in buffers if b.first is not None and b.last is not None]
    return sorted(used, key=lambda life: life[0])


def capture(
    kernels: Native, shadow: Shadow, run: Callable[[Tensor, Tensor], Tensor], max_tokens: int, max_logits: int
) -> Program:
    """The pass that `run(token_ids [7], keep [3]) -> logits` makes through `shadow`, as a program.

    Raises NotCapturableError if it does what the kernels cannot.
    """
    token_ids = torch.arange(CAPTURED_TOKENS)
    keep = torch.arange(CAPTURED_TOKENS - CAPTURED_LOGITS, CAPTURED_TOKENS)
    ropes = [module for module in shadow.module.modules() if isinstance(module, RopeTable)]
    mode = Capture(token_ids, keep)
    for rope in ropes:
        object.__setattr__(rope, "forward", mode.look_away_at(rope))
    kernels.trace = mode.note_kernel
    try:
        with torch.no_grad(), mode:
            logits = run(token_ids, keep)
        return Program(kernels, mode, logits, max_tokens, max_logits)
    finally:
        kernels.trace = None
        for rope in ropes:
            object.__delattr__(rope, "forward")
