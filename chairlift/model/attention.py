"""The seam to Hugging Face models: one registered attention function.

A transformers model calls it in every attention layer with the new tokens' queries, keys and values, after RoPE; the
plan that does the work lies in the layer's `seam`. No Cache class, no mask, no patched forward.

Shapes: T packed new tokens of all rows, H query heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from chairlift.cache.storage import KVStorage
from chairlift.errors import UnsupportedModelError
from chairlift.kernels import AttentionPlan, Native, Ops, native
from chairlift.kernels.native import ClStep

ATTENTION = "chairlift"
DISCOVERY = "chairlift-discovery"  # the same, but layers are also asked which mask they mean
FAR = 1 << 20  # tokens; a window of this size or more is none


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one attention layer is called with, apart from the tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


class Plan(Protocol):
    """What does the attention of one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        """query [1, H, T, D], key [1, G, T, D], value [1, G, T, Dv] -> [1, T, H, Dv]."""
        ...


class Seam:
    """Where the layers of one shadow find the plan of the pass under way, as their attribute `seam`.

    Not a keyword of the model's forward: some models do not hand keywords through, and hooks would see it.
    """

    plan: Plan | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H], logits of the attention sinks
    **unused: object,
) -> tuple[Tensor, None]:
    """The function that transformers models call. Raises UnsupportedModelError for what it does not know."""
    name = type(module).__name__
    seam: Seam | None = getattr(module, "seam", None)
    if seam is None or seam.plan is None:
        raise UnsupportedModelError(f"{name} does not say which layer it is; its cache would be ambiguous")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} brings an attention mask of its own; only causal masks can be served")
    if (bias := next((k for k in ("position_bias", "head_mask") if unused.get(k) is not None), None)) is not None:
        raise UnsupportedModelError(f"{name} attends with a {bias}, which the paged cache cannot serve")
    call = LayerCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )
    return seam.plan.attend(module.layer_idx, query, key, value, call, s_aux), None  # type: ignore[arg-type]


def discovery_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # of `describe_mask`
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attention_forward` with the window that the layer's mask means: not every model also says it as an argument."""
    if attention_mask is not None:
        name = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        low, high = (int(bound) for bound in attention_mask.aminmax())
        if low != high or low <= 0:
            raise UnsupportedModelError(f"{name} has a mask that is neither causal nor a sliding window")
        window = None if low >= FAR else low
        if sliding_window and sliding_window != window:
            raise UnsupportedModelError(f"{name} has a window of {sliding_window}, but one of {window} in its mask")
        sliding_window = window
    return attention_forward(module, query, key, value, None, sliding_window=sliding_window, **kwargs)


def describe_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: torch.device, **unused: object
) -> Tensor:
    """In place of a mask its window, in every element: [1, 1, q_length, kv_length]. FAR is none, 0 another mask."""
    if device.type == "meta":  # a model without weights; what its mask means can be computed all the same
        device = torch.device("cpu")
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(FAR + 1, device=device)
    windows = set()
    for query in (FAR - 1, FAR // 3):
        seen = torch.broadcast_to(mask_function(zero, zero, zero + query, keys), keys.shape)
        window = int(seen.count_nonzero())
        is_regular = bool(seen[max(query + 1 - window, 0) : query + 1].all()) and window <= query + 1
        windows.add((FAR if window > query else window) if is_regular else 0)
    window = windows.pop() if len(windows) == 1 else 0
    described: Tensor = torch.full((1, 1, q_length, kv_length), float(window), device=device)
    return described


AttentionInterface.register(ATTENTION, attention_forward)
AttentionInterface.register(DISCOVERY, discovery_forward)
AttentionMaskInterface.register(DISCOVERY, describe_mask)


class ReferenceStep:
    """One step's attention by the PyTorch operators: store the new KV of every layer, then attend over the pages.

    Plans and slot mappings are made once per step for each group of layers and shared by the layers of the group.
    """

    def __init__(
        self,
        ops: Ops,
        storage: KVStorage,
        plans: Mapping[int, AttentionPlan],  # by layer
        slot_mapping: Mapping[int, Tensor],  # by layer, int64 [T]: block * page_size + offset of each new token
    ) -> None:
        self._ops = ops
        self._storage = storage
        self._plans = plans
        self._slots = slot_mapping

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        if call.value_dim < call.head_dim:
            value = nn.functional.pad(value, (0, call.head_dim - call.value_dim))
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._attend(layer, q, k, v, call, sinks)[None, :, :, : call.value_dim]

    def store_and_attend(
        self,
        layer: int,
        q: Tensor,  # [T, H * D]
        k: Tensor,  # [T, G * D]
        v: Tensor,  # [T, G * D]
        call: LayerCall,
        sinks: Tensor | None,
        rope: "RopeStyle",
    ) -> Tensor:  # [T, H * D]
        """Norm and rotate q and k in place as `rope` says, write k and v to the pages, attend."""
        q, k, v = (tensor.unflatten(1, (-1, call.head_dim)) for tensor in (q, k, v))
        self._ops.turn(q, k, rope.rotation, **rope.style)
        return self._attend(layer, q, k, v, call, sinks).flatten(1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
        keys, values = self._storage.key(layer), self._storage.value(layer)
        self._ops.store_kv(k, v, keys, values, self._slots[layer])
        return self._ops.paged_attention(
            q, keys, values, self._plans[layer], scale=call.scale, softcap=call.softcap, sinks=sinks
        )


class NativeStep:
    """One step's attention by the C++ kernels, straight from the block tables."""

    def __init__(
        self, kernels: Native, storage: KVStorage, groups: Mapping[int, int], step: ClStep, memory: object
    ) -> None:
        """`memory`: what the addresses in `step` point to."""
        self.step = step
        self._memory = memory
        self._kernels = kernels
        self._storage = storage
        self._groups = groups  # by layer

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        if call.value_dim < call.head_dim:
            value = nn.functional.pad(value, (0, call.head_dim - call.value_dim))
        q, k, v = (token_rows(tensor) for tensor in (query, key, value))
        out = self.store_and_attend(layer, q, k, v, call, sinks, None)
        return out.view(1, -1, call.num_heads, call.head_dim)[..., : call.value_dim]

    def store_and_attend(
        self,
        layer: int,
        q: Tensor,  # [T, H * D]
        k: Tensor,  # [T, G * D]
        v: Tensor,  # [T, G * D]
        call: LayerCall,
        sinks: Tensor | None,
        rope: "RopeStyle | None",
    ) -> Tensor:  # [T, H * D]
        """Norm and rotate q and k in place as `rope` says, write k and v to the pages, attend."""
        pages, group = self._storage.pages(layer), self._groups[layer]
        head: dict[str, Any] = {"head_dim": call.head_dim, "group": group}
        rotation, style = (None, {}) if rope is None else (rope.rotation, rope.style)
        self._kernels.run(native.rope_store(q, k, v, rotation, pages, **head, **style), 1, self.step)
        out = q.new_empty(q.shape[0], q.shape[1])
        op = native.attend(
            q,
            pages,
            out,
            **head,
            kv_heads=call.num_kv_heads,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=None if sinks is None else sinks.float(),
        )
        self._kernels.run(op, 1, self.step)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStyle:
    """How a layer turns queries and keys before it stores them."""

    rotation: tuple[Tensor, Tensor] | None  # cos and sin [T, rotary_dim]
    style: Mapping[str, Any]  # further arguments of `native.rope_store`


PagedStep = ReferenceStep | NativeStep


def token_rows(heads: Tensor) -> Tensor:
    """[1, heads, T, D] as [T, heads * D]."""
    return heads[0].transpose(0, 1).reshape(heads.shape[2], -1)
