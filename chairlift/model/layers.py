"""Layers of the shadow that replace the model's own: same numbers, but no row depends on its neighbours.

A replacement keeps the parameters of what it replaces under their names, so that weights stay shared.
"""

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from chairlift.kernels import Ops
from chairlift.kernels.invariant import BatchInvariant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROPE_BLOCK = 256  # positions computed at a time; whole blocks, so that a position's bits never depend on the request
ROPE_BLOCKS_KEPT = 64  # least recently used ones go: where factors depend on the length, each length has its own


def replacement(source: nn.Module, ops: Ops) -> nn.Module | None:
    """What stands in for `source` in the shadow, or None if it stays."""
    if isinstance(source, (nn.Linear, Conv1D)) and type(source) in (nn.Linear, Conv1D):
        return Projection(source, ops) if source.weight.dtype in DTYPES else None
    if type(source).__module__ in ("transformers.activations", "torch.nn.modules.activation") and not list(
        source.parameters()
    ):
        return Activation(source, ops)
    name = type(source).__name__
    if "RotaryEmbedding" in name and hasattr(source, "rope_type") and _arguments(source)[:2] == ["x", "position_ids"]:
        return RopeTable(source)
    return None


KNOWN = (nn.Linear, Conv1D, nn.Embedding)


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def stamp(tensor: Tensor) -> tuple[int, int, int]:
    """Differs once a tensor has been replaced, written to or moved; a write through `.data` leaves no trace."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class Derived(nn.Module):
    """A module with something made of its parameters: when first needed, and again when they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: Any = None
        self._stamp: tuple[object, ...] = ()

    def _parameters_used(self) -> list[Tensor | None]:
        raise NotImplementedError

    def _make(self) -> Any:
        raise NotImplementedError

    @property
    def made(self) -> Any:
        """What `_make` gives for the parameters as they are."""
        if self._made is None:
            self._stamp = self._stamp_now()
            self._made = self._make()
        return self._made

    def refresh(self, force: bool = False) -> None:
        """Forget what was made of parameters that were replaced or written to since."""
        if force or (self._made is not None and self._stamp != self._stamp_now()):
            self._made = None

    def _stamp_now(self) -> tuple[object, ...]:
        used = [p for p in self._parameters_used() if p is not None]
        return tuple(stamp(p) for p in used)


class Projection(Derived):
    """`nn.Linear`, or GPT-2's `Conv1D`, through a packed, batch-invariant matmul."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, source: nn.Linear | Conv1D, ops: Ops) -> None:
        super().__init__()
        self.weight = source.weight
        self.register_parameter("bias", source.bias)
        self._ops = ops
        self._is_transposed = type(source) is Conv1D

    def _parameters_used(self) -> list[Tensor | None]:
        return [self.weight, self.bias]

    def _make(self) -> Any:
        return self._ops.pack_linear(self.matrix, self.bias)

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.detach().t() if self._is_transposed else self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return self._ops.linear(x, self.made)


def calls_torch_itself(module: nn.Module) -> bool:
    """Whether matrices are multiplied in it, and no attention is done, that no `Projection` stands for: a router's,
    say, or experts'."""
    parts = list(module.modules())
    own = [p for part in parts if not isinstance(part, KNOWN) for p in part._parameters.values() if p is not None]
    return any(p.ndim >= 2 for p in own) and not any(hasattr(part, "seam") for part in parts)


class Invariant(nn.Module):
    """A module that works as it is, but whose matmuls and activations do not let rows depend on their neighbours."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with BatchInvariant():
            return self.source.forward(*args, **kwargs)


class Activation(nn.Module):
    """An elementwise function whose result for an element does not depend on where in the tensor it stands."""

    def __init__(self, source: nn.Module, ops: Ops) -> None:
        super().__init__()
        self.source = source
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.elementwise(self.source.forward, x)


class RopeTable(nn.Module):
    """A rotary embedding read from tables that its source has filled, a block of positions at a time.

    Factors of some kinds (longrope, dynamic NTK) depend on the length of the sequence. `regimes` then says for each
    token which length its own request had, never the longest of the batch; regime 0 is any up to the original length.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source
        kind = getattr(source, "rope_type", "default")
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        self.kind = next((k for k in ("longrope", "dynamic") if k in kinds), "default")
        self.regimes: list[int] | None = None  # of each token of the next pass; None: all 0
        self._tables: dict[tuple[Any, ...], list[Any]] = {}  # regime 0, block after block
        self._blocks: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # the other regimes

    @property
    def original_length(self) -> int:
        """Tokens up to which the factors do not depend on the length."""
        source: Any = self.source
        if self.kind == "longrope":
            return int(source.config.rope_parameters["original_max_position_embeddings"])
        return int(source.original_max_seq_len)

    def regime(self, length: int) -> int:
        """What the factors of a sequence of `length` tokens depend on: equal regimes, equal factors."""
        if self.kind == "default" or length <= self.original_length:
            return 0
        return length if self.kind == "dynamic" else self.original_length + 1

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:  # position_ids [1, T]
        variant = (x.dtype, args, tuple(kwargs.items()))
        positions = position_ids[0]
        if self.regimes is None:
            table = self._table(x, int(positions.max()) // ROPE_BLOCK + 1, variant)
            return tree_map(lambda part: part.index_select(1, positions), table)
        keys = [(regime, p // ROPE_BLOCK) for regime, p in zip(self.regimes, positions.tolist(), strict=True)]
        index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        blocks = [self._block(x, *key, variant) for key in index]
        rows = torch.tensor([index[key] * ROPE_BLOCK for key in keys]) + positions % ROPE_BLOCK
        return tree_map(lambda *parts: torch.cat(parts, dim=1).index_select(1, rows), *blocks)

    def rows(self, x: Tensor, num_positions: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `forward` reads its answer from while no token has a regime: tensors [1, positions, ...] of at least the
        first `num_positions`, the same ones again until they have to grow."""
        return self._table(x, -(-num_positions // ROPE_BLOCK), (x.dtype, args, tuple(kwargs.items())))

    def _table(self, x: Tensor, num_blocks: int, variant: tuple[Any, ...]) -> Any:
        """At least the first `num_blocks` blocks, one after the other: tensors [1, positions, ...]."""
        blocks = self._tables.setdefault(variant, [])
        covered = len(blocks) and blocks[0]
        if covered < num_blocks:
            wanted = max(num_blocks, 2 * covered)
            parts = [self._compute(x, 0, block, variant) for block in range(wanted)]
            blocks[:] = [wanted, tree_map(lambda *each: torch.cat(each, dim=1), *parts)]
        return blocks[1]

    def _block(self, x: Tensor, regime: int, block: int, variant: tuple[Any, ...]) -> Any:
        key = (regime, block, variant)
        if key not in self._blocks:
            self._blocks[key] = self._compute(x, regime, block, variant)
        self._blocks.move_to_end(key)
        if len(self._blocks) > ROPE_BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return self._blocks[key]

    def _compute(self, x: Tensor, regime: int, block: int, variant: tuple[Any, ...]) -> Any:
        """The source's output for one block of positions: tensors [1, ROPE_BLOCK, ...]."""
        _, args, kwargs = variant
        positions = torch.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK, device=x.device)[None]
        if self.kind == "default":
            return self.source.forward(x, positions, *args, **dict(kwargs))
        # The source reads the length off the largest position: keep the others below it and add one that says it.
        length = regime or 1
        if self.kind == "dynamic" or not regime:
            positions = positions.clamp(max=(regime or self.original_length) - 1)
        if self.kind == "dynamic":
            self.source.forward(x, positions[:, :1] * 0, *args, **dict(kwargs))  # back from any longer length
        asked = torch.cat([positions, torch.full_like(positions[:, :1], length - 1)], dim=1)
        out = self.source.forward(x, asked, *args, **dict(kwargs))
        return tree_map(lambda part: part[:, :ROPE_BLOCK], out)
