"""Batch invariance for code that calls PyTorch itself: routers, experts, and activations written inline.

Inside `with BatchInvariant():` the matmuls and the elementwise functions that are not batch-invariant as PyTorch has
them are done by ones that are. Costs about a microsecond of Python per call of PyTorch, so it is for the modules that
`linear` and `elementwise` cannot replace. Not covered: `einsum`, and vectors as operands of a matmul.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from chairlift.kernels.reference import elementwise, matmul, unpacked_linear


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b) if a.dim() > 1 and b.dim() > 1 else torch.matmul(a, b)


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * matmul(x, weight)


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):  # two tensors: only `pow` of tensors
            return function(x, *args, **kwargs)
        return elementwise(lambda aligned: function(aligned, *args, **kwargs), x)

    return call


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: unpacked_linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _matmul),
    **{
        function: _elementwise(function)
        for function in (
            *(F.silu, F.gelu, F.softplus, F.mish, F.elu),
            *(torch.sigmoid, torch.rsqrt, torch.exp2, torch.pow),
            *(Tensor.sigmoid, Tensor.rsqrt, Tensor.exp2, Tensor.pow, Tensor.__pow__),
        )
    },
}


class BatchInvariant(TorchFunctionMode):
    """A context, of this thread alone, in which no row of a result depends on the rows beside it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = _FUNCTIONS.get(func, func)
        return call(*args, **(kwargs or {}))
