"""One table of operators by device and dtype. Refuses to know models, requests and schedules.

Every implementation keeps the contract of `reference`: the bits of a row do not depend on the rows beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from chairlift.kernels import reference
from chairlift.kernels.native import Activation, Native
from chairlift.kernels.native import native as machine_kernels
from chairlift.kernels.plan import AttentionPlan, KVLayout, Scratch, build_attention_plan
from chairlift.kernels.reference import PackedLinear

__all__ = ["AttentionPlan", "KVLayout", "Native", "Ops", "PackedLinear", "Scratch", "ops_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The operators of one device; signatures and shapes are those of `reference` and `plan`."""

    pack_linear: Callable[..., Any]  # its result is for `linear` alone
    linear: Callable[[Tensor, Any], Tensor]
    pack_gated: Callable[..., Any]  # its result is for `gated` alone
    gated: Callable[[Tensor, Any, Activation], Tensor]
    norm: Callable[..., Tensor]
    turn: Callable[..., None]
    elementwise: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    build_attention_plan: Callable[..., AttentionPlan]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]
    packs: bool = True  # whether `pack_linear` makes a copy of the weight
    native: Native | None = None  # the C++ kernels, where there are any


REFERENCE = Ops(
    pack_linear=reference.pack_linear,
    linear=reference.linear,
    pack_gated=reference.pack_gated,
    gated=reference.gated,
    norm=reference.norm,
    turn=reference.turn,
    elementwise=reference.elementwise,
    build_attention_plan=build_attention_plan,
    store_kv=reference.store_kv,
    paged_attention=reference.paged_attention,
)

UNPACKED = replace(
    REFERENCE,
    pack_linear=lambda weight, bias=None: (weight, bias),
    linear=lambda x, packed: reference.unpacked_linear(x, *packed),
    packs=False,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ops_for(device: torch.device, dtype: torch.dtype, pack_weights: bool = True) -> Ops:
    """The fastest operators for models of `dtype` on `device`; without packed weights those that read weights in
    place. Raises `ValueError` where there are none."""
    if device.type != "cpu" or dtype not in _DTYPES:
        raise ValueError(f"no operators for {dtype} on {device}; use float32, bfloat16 or float16 on the CPU")
    if not pack_weights:
        return UNPACKED
    if (kernels := machine_kernels()) is None:
        return REFERENCE
    return replace(
        REFERENCE,
        pack_linear=kernels.pack,
        linear=kernels.linear,
        pack_gated=kernels.pack_gated,
        gated=kernels.gated,
        norm=kernels.norm,
        native=kernels,
    )
