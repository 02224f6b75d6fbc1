"""The seam to Hugging Face models: one registered attention function.

A transformers model calls it in every attention layer with the new tokens' queries, keys and values, after RoPE, and
hands through the keyword `plan`, which does the work. No Cache class, no mask, no patched forward.

Shapes: T packed new tokens of all rows, H query heads, G key/value heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from chairlift.cache.storage import KVStorage
from chairlift.errors import UnsupportedModelError
from chairlift.kernels import AttentionPlan, Ops

ATTENTION = "chairlift"


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
    """What the model's `plan` keyword must be."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        """query [1, H, T, D], key [1, G, T, D], value [1, G, T, Dv] -> [1, T, H, Dv]."""
        ...


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
    plan: Plan | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """The function that transformers models call. Raises UnsupportedModelError for what it does not know."""
    name = type(module).__name__
    if plan is None:
        raise UnsupportedModelError(f"{name} does not hand keyword arguments through to its attention")
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
    return plan.attend(module.layer_idx, query, key, value, call, s_aux), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, attention_forward)


class Recorder:
    """A plan that only notes what each layer is called with."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall, sinks: Tensor | None
    ) -> Tensor:
        if layer in self.calls:
            raise UnsupportedModelError(f"layer {layer} attends twice in one pass; its cache would be ambiguous")
        self.calls[layer] = call
        return query.new_zeros(1, query.shape[2], call.num_heads, call.value_dim)


class AttentionBatch:
    """One step's attention: store the new KV of every layer, then attend over the pages.

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
        keys, values = self._storage.key(layer), self._storage.value(layer)
        if call.value_dim < call.head_dim:
            value = nn.functional.pad(value, (0, call.head_dim - call.value_dim))
        self._ops.store_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, self._slots[layer])
        out = self._ops.paged_attention(
            query[0].transpose(0, 1),
            keys,
            values,
            self._plans[layer],
            scale=call.scale,
            softcap=call.softcap,
            sinks=sinks,
        )
        return out[None, :, :, : call.value_dim]
