"""Fused modules for the shadow: several modules of a model in a few calls of the kernels, in C++ or PyTorch.

What is recognised is recognised by structure, never by a model's name, and accepted only if it gives what the modules
themselves gave on a probe. Everything else stays as it is. A module that a user has hooked does its own work.
"""

import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from chairlift.errors import UnsupportedModelError
from chairlift.kernels import Ops
from chairlift.kernels.native import Activation, NormFlags
from chairlift.model.attention import LayerCall, PagedStep, RopeStyle, Seam, token_rows
from chairlift.model.layers import Derived, Projection

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the largest number


class Call(NamedTuple):
    """One call of a module during the probe."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def is_hooked(modules: Iterable[nn.Module]) -> bool:
    """Whether a user wants to see or change what goes through one of these modules."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _close(got: Tensor, wanted: Tensor) -> bool:
    if got.shape != wanted.shape:
        return False
    error, size = (got.float() - wanted.float()).abs().max(), wanted.float().abs().max()
    return bool(error <= TOLERANCE[wanted.dtype] * size + 1e-6)


class Norm(nn.Module):
    """An RMS norm or a layer norm."""

    def __init__(self, source: nn.Module, ops: Ops, eps: float, flags: NormFlags) -> None:
        super().__init__()
        self.source = source
        self.eps = eps
        self.flags = flags
        self._ops = ops

    @property
    def weight(self) -> Tensor | None:
        return self.source._parameters.get("weight")

    def forward(self, x: Tensor) -> Tensor:
        if self.source._forward_hooks or self.source._forward_pre_hooks:
            out: Tensor = self.source(x)
            return out
        bias = self.source._parameters.get("bias")
        return self._ops.norm(x, self.weight, bias, eps=self.eps, flags=self.flags)

    @staticmethod
    def recognise(source: nn.Module, call: Call, ops: Ops) -> "Norm | None":
        """The norm that gives what `source` gave, if one does."""
        if len(call.args) != 1 or call.kwargs or not isinstance(call.output, Tensor):
            return None
        x = call.args[0]
        parameters = dict(source.named_parameters())
        if not set(parameters) <= {"weight", "bias"} or any(
            p.dtype != x.dtype or p.dim() != 1 for p in parameters.values()
        ):
            return None
        names = ("variance_epsilon", "eps", "norm_eps", "epsilon", "layer_norm_epsilon")
        eps = next((float(getattr(source, name)) for name in names if getattr(source, name, None) is not None), 1e-6)
        candidates = [
            Norm(source, ops, eps, NormFlags(flags))
            for flags in (NormFlags.ROUND_FIRST, 0, NormFlags.PLUS_ONE, NormFlags.LAYER_NORM)
        ]
        errors = [(candidate(x).float() - call.output.float()).abs().mean().item() for candidate in candidates]
        best = candidates[errors.index(min(errors))]
        return best if _close(best(x), call.output) else None


class GatedMLP(Derived):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, source: nn.Module, parts: list[Projection], ops: Ops, activation: Activation) -> None:
        super().__init__()
        self.source = source
        self.parts = parts[:-1]
        self._down = [parts[-1]]  # in a list, so that it is not a child twice
        self._ops = ops
        self._activation = activation

    def _parameters_used(self) -> list[Tensor | None]:
        return [tensor for part in self.parts for tensor in (part.weight, part.bias)]

    def _make(self) -> Any:
        weights = [weight for part in self.parts for weight in part.matrix.chunk(3 - len(self.parts))]
        biases = [bias for part in self.parts if part.bias is not None for bias in part.bias.chunk(3 - len(self.parts))]
        return self._ops.pack_gated(*weights, *biases)

    def forward(self, x: Tensor) -> Tensor:
        if is_hooked((*self.parts, self.source)):
            out: Tensor = self.source(x)
            return out
        down: Tensor = self._down[0](self._ops.gated(x, self.made, self._activation))
        return down

    @staticmethod
    def recognise(source: nn.Module, call: Call, ops: Ops) -> "GatedMLP | None":
        """The fused layer that gives what `source` gave, if one does."""
        parts = _projections(source, ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
        if parts is None or len(call.args) != 1 or call.kwargs or not isinstance(call.output, Tensor):
            return None
        if len({part.bias is None for part in parts[:-1]}) > 1:
            return None
        for activation in (Activation.SILU, Activation.GELU_TANH, Activation.GELU, Activation.RELU):
            fused = GatedMLP(source, parts, ops, activation)
            if _close(fused(call.args[0]), call.output):
                return fused
        return None


class Attention(Derived):
    """Projections, norms and rotation of queries and keys, attention over the pages, the output's projection."""

    def __init__(
        self, source: nn.Module, parts: list[Projection], norms: list[Norm], ops: Ops, call: LayerCall
    ) -> None:
        super().__init__()
        self.source = source
        self.parts = parts[:-1]
        self.norms = norms
        self._out = [parts[-1]]
        self._ops = ops
        self._call = call
        self._layer: int = source.layer_idx  # type: ignore[assignment]
        self._seam: Seam = source.seam  # type: ignore[assignment]
        self._names = list(inspect.signature(source.forward).parameters)
        self.interleaved = False

    def _parameters_used(self) -> list[Tensor | None]:
        return [tensor for part in self.parts for tensor in (part.weight, part.bias)]

    def _make(self) -> Any:
        biases = [part.bias for part in self.parts if part.bias is not None]
        return self._ops.pack_linear(
            torch.cat([part.matrix for part in self.parts]), torch.cat(biases) if biases else None
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._seam.plan
        if not isinstance(plan, PagedStep) or is_hooked((self.source, *self.parts, *(n.source for n in self.norms))):
            return self.source(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        q, k, v, rope = self.project(given["hidden_states"], given.get("position_embeddings"))
        out = plan.store_and_attend(self._layer, q, k, v, self._call, None, rope)
        return self._out[0](out[None]), None

    def project(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, RopeStyle]:
        """hidden [1, T, width] -> q [T, H * D], k and v [T, G * D], and what is still to be done to q and k."""
        call = self._call
        width = call.num_kv_heads * call.head_dim
        sizes = [call.num_heads * call.head_dim, width, width]
        q, k, v = torch.split(self._ops.linear(hidden[0], self.made), sizes, dim=1)
        style: dict[str, Any] = {"interleaved": self.interleaved}
        if self.norms and self.norms[0].weight is not None and self.norms[0].weight.shape[0] == call.head_dim:
            first, second = self.norms
            style |= {"norms": (first.weight, second.weight), "flags": first.flags, "eps": first.eps}
        elif self.norms:
            q, k = (norm(x) for norm, x in zip(self.norms, (q, k), strict=True))
        turned = None if rotation is None else (rotation[0][0], rotation[1][0])
        return q, k, v, RopeStyle(rotation=turned, style=style)

    @staticmethod
    def recognise(source: nn.Module, call: Call, ops: Ops, seen: "Seen", norms: list[Norm]) -> "Attention | None":
        """The fused layer that gives the queries, keys, values and output that `source` gave, if one does."""
        parts = _projections(source, ("q_proj", "k_proj", "v_proj", "o_proj"), ("qkv_proj", "o_proj"))
        if parts is None or not hasattr(source, "layer_idx") or source.layer_idx not in seen.layers:
            return None
        if len({part.bias is None for part in parts[:-1]}) > 1:
            return None
        layer, query, key, value = seen.layers[source.layer_idx]  # type: ignore[index]
        names = list(inspect.signature(source.forward).parameters)
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        if layer.has_sinks or layer.value_dim != layer.head_dim or "hidden_states" not in given:
            return None
        if bool(norms) != any(hasattr(source, name) for name in ("q_norm", "k_norm")) or len(norms) == 1:
            return None
        fused = Attention(source, parts, norms, ops, layer)
        if not _close(parts[-1](token_rows(query)[None]), call.output[0]):
            return None
        for fused.interleaved in (False, True):
            q, k, v, rope = fused.project(given["hidden_states"], given.get("position_embeddings"))
            ops.turn(*(x.unflatten(1, (-1, layer.head_dim)) for x in (q, k)), rope.rotation, **rope.style)
            if all(_close(got, token_rows(wanted)) for got, wanted in ((q, query), (k, key), (v, value))):
                return fused
        return None


def _projections(source: nn.Module, *shapes: tuple[str, ...]) -> list[Projection] | None:
    """The projections that have all the names of one of `shapes`, without hooks."""
    for names in shapes:
        parts = [getattr(source, name, None) for name in names]
        if all(isinstance(part, Projection) for part in parts):
            found = [part for part in parts if isinstance(part, Projection)]
            return None if is_hooked(found) or len({part.weight.dtype for part in found}) > 1 else found
    return None


class Seen:
    """A plan for the probe: notes each layer's queries, keys and values, and gives the queries for an output."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[LayerCall, Tensor, Tensor, Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        if layer in self.layers:
            raise UnsupportedModelError(f"layer {layer} attends twice in one pass; its cache would be ambiguous")
        self.layers[layer] = (call, query.clone(), key.clone(), value.clone())
        return query.transpose(1, 2)[..., : call.value_dim]


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Call]]:
    """Notes the calls of `modules`, without a hook: hook dictionaries are the user's."""
    calls: dict[nn.Module, Call] = {}
    modules = list(modules)

    def watch(module: nn.Module) -> None:
        forward = module.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            kept = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
            named = {key: arg.clone() if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
            out = forward(*args, **kwargs)
            calls[module] = Call(kept, named, out.clone() if isinstance(out, Tensor) else out)
            return out

        object.__setattr__(module, "forward", noting)

    for module in modules:
        watch(module)
    try:
        yield calls
    finally:
        for module in modules:
            object.__delattr__(module, "forward")


def candidates(root: nn.Module) -> list[nn.Module]:
    """Modules that might be fused: small norms, and what holds projections."""
    return [
        module
        for module in root.modules()
        if "Norm" in type(module).__name__ or any(isinstance(child, (nn.Linear, Conv1D)) for child in module.children())
    ]


@torch.no_grad()
def fuse(root: nn.Module, calls: dict[nn.Module, Call], seen: Seen, ops: Ops) -> dict[str, int]:
    """Replace in `root` all that is recognised; returns how many modules of each kind took which path."""
    fused: dict[nn.Module, nn.Module] = {}
    for module, call in calls.items():
        if "Norm" in type(module).__name__ and (norm := Norm.recognise(module, call, ops)) is not None:
            fused[module] = norm
    for module, call in calls.items():
        if module in fused or is_hooked([module]):
            continue
        norms = [fused.get(getattr(module, name, module)) for name in ("q_norm", "k_norm")]
        found = [norm for norm in norms if isinstance(norm, Norm)]
        whole = GatedMLP.recognise(module, call, ops) or Attention.recognise(module, call, ops, seen, found)
        if whole is not None:
            fused[module] = whole
    counts: dict[str, int] = {}
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if (new := fused.get(child)) is not None and not isinstance(parent, (Norm, GatedMLP, Attention)):
                new.eval()
                parent.add_module(name, new)
                kind = type(child).__name__
                counts[kind] = counts.get(kind, 0) + 1
    for module in itertools.chain.from_iterable(
        f.parts for f in fused.values() if isinstance(f, (GatedMLP, Attention))
    ):
        module.refresh(force=True)  # packed for the probe; its fused owner has its own
    return counts
