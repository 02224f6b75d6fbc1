"""Capture of a model's forward pass as a program of the C++ kernels, and its replay in one call.

A capture runs the shadow once on a few tokens and notes every kernel operation and every PyTorch operation between
them. If each of the latter has a counterpart among the kernels, the pass is a program over buffers of its own; if not,
the model stays with the eager path. Knows operations and addresses; knows no architecture.

T: tokens of a step, R: those that get logits.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
        _set_lifetimes(ops, capture.buffers, logits)
        self._memory, moved = _place(capture.buffers, max_tokens, max_logits)
        starts = sorted(capture.buffers)
        for op in ops:
            for index in range(len(op.p)):
                if (address := op.p[index]) is not None:
                    buffer = capture.buffers[starts[max(bisect_right(starts, address) - 1, 0)]]
                    if buffer.address <= address < buffer.address + buffer.num_bytes:
                        op.p[index] = moved[buffer.address].data_ptr() + address - buffer.address
        self._ops = (ClOp * len(ops))(*ops)
        self.num_ops = len(ops)
        self._inputs = [
            (rope, args, kwargs, [self._typed(moved[_begin(t)], t, max_tokens) for t in tensors])
            for rope, args, kwargs, tensors in capture.inputs
        ]
        self._logits = self._typed(moved[_begin(logits)], logits, max_logits)

    @staticmethod
    def _typed(memory: Tensor, like: Tensor, rows: int) -> Tensor:
        width = like.shape[-1]
        return memory[: rows * width * like.dtype.itemsize].view(like.dtype).view(rows, width)

    def run(self, step: ClStep, token_ids: Tensor, position_ids: Tensor, keep: Tensor) -> Tensor:
        """Logits [R, vocab], valid until the next run."""
        count = len(token_ids)
        for rope, args, kwargs, buffers in self._inputs:
            for buffer, value in zip(buffers, rope(self._logits, position_ids[None], *args, **kwargs), strict=True):
                buffer[:count] = value[0]
        step.token_ids, step.keep = token_ids.data_ptr(), keep.data_ptr()
        self._kernels.run(self._ops, self.num_ops, step)
        return self._logits[: len(keep)]


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


def _set_lifetimes(ops: list[ClOp], buffers: dict[int, Buffer], logits: Tensor) -> None:
    starts = sorted(buffers)
    for number, op in enumerate(ops):
        for address in op.p:
            if address is None:
                continue
            buffer = buffers[starts[max(bisect_right(starts, address) - 1, 0)]]
            if buffer.address <= address < buffer.address + buffer.num_bytes:
                buffer.first = number if buffer.first is None else buffer.first
                buffer.last = number
    buffers[_begin(logits)].last = len(ops)


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
