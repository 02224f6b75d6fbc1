"""The operators in PyTorch, for the CPU: every row of a result has the same bits whatever rows it is computed with.

Refuses to know models, requests and schedules. What PyTorch itself guarantees is little, so each operator fixes the
shapes that decide which kernel runs (measured on x86 with oneDNN and MKL; `tests/kernels` holds it to that):

- a oneDNN matmul with a prepacked weight gives a row the same bits for any number of rows from 2 on;
- an MKL float32 matmul does so when its rows are a multiple of 4 (a batched one) or 16, and its columns not too few;
- an elementwise function does so when no thread ends on a partial vector, whose scalar code rounds otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chairlift.kernels.native import Activation, NormFlags
from chairlift.kernels.plan import KEY_TILE, AttentionPlan, AttentionSlice, KVLayout

ROW_MULTIPLE = 4  # of the rows of a float32 batched matmul
MIN_COLUMNS = 16  # of its result: with less than 12 a row's bits depend on its place
ROW_TILE = 16  # multiple of the rows of a matmul with a weight that is not prepacked
MIN_FEATURES = 32  # of such a weight: smaller products run on kernels that depend on the number of rows
VECTOR_BLOCK = 128  # elements; a multiple of what any unrolled vector loop of PyTorch takes in one turn
GRAIN = 32768  # at::internal::GRAIN_SIZE: elements a thread takes at least


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A weight laid out for `linear`. Holds a copy: pack again when the weight changes."""

    weight: Tensor  # [out_features, in_features], or oneDNN's opaque layout of it
    bias: Tensor | None  # [out_features]
    out_features: int
    prepacked: bool


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Lay out `weight` [out_features, in_features], of any strides and floating dtype, with `bias` [out_features]."""
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if weight.dtype == torch.float16:  # no fast float16 matmul here: float32 and one rounding at the end
        weight, bias = weight.float(), None if bias is None else bias.float()
    prepacked = _can_prepack(weight.dtype)
    packed = weight.clone(memory_format=torch.contiguous_format)
    if prepacked:
        packed = torch.ops.mkldnn._reorder_linear_weight(packed)
    return PackedLinear(weight=packed, bias=bias, out_features=weight.shape[0], prepacked=prepacked)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """`x` [..., in_features] to [..., out_features], in the dtype of `x`."""
    rows = x.reshape(-1, x.shape[-1]).to(packed.weight.dtype).contiguous()
    if packed.prepacked:
        count = rows.shape[0]
        rows = _pad_rows(rows, 2) if count == 1 else rows
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed.weight, packed.bias, "none", [], "")
        out = out[:count]
    else:
        out = unpacked_linear(rows, packed.weight, packed.bias)
    return out.to(x.dtype).view(*x.shape[:-1], packed.out_features)


def pack_gated(
    gate: Tensor, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> PackedLinear:
    """Lay out two weights [out_features, in_features] as one. They have biases both, or neither."""
    biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
    return pack_linear(torch.cat((gate, up)), torch.cat(biases) if biases else None)


def gated(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    """activation(x G^T) * (x U^T), for `x` [..., in_features]."""
    gate, up = linear(x, packed).chunk(2, -1)
    return elementwise(_ACTIVATIONS[activation], gate).mul_(up)


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU: F.relu,
}


def unpacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for a weight [out_features, in_features] of which no copy is kept; slower."""
    if weight.dtype == torch.float16 or min(weight.shape) < MIN_FEATURES:
        packed = pack_linear(weight, bias)
        if packed.prepacked:
            return linear(x, packed)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = F.linear(_pad_rows(rows, ROW_TILE), weight, bias)[: rows.shape[0]]
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for `a` [..., rows, k] and `b` [..., k, n]."""
    if b.dim() == 2:
        return unpacked_linear(a, b.t())
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lefts, rights = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    products = [unpacked_linear(left, right.t()) for left, right in zip(lefts, rights, strict=True)]
    return torch.stack(products).view(*batch, a.shape[-2], b.shape[-1])


def _can_prepack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pad_rows(x: Tensor, multiple: int) -> Tensor:
    """`x` [..., rows, n] with zeros up to a multiple of rows."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)` for a function that maps each element by itself, such as SiLU or GELU; any shape."""
    flat = x.contiguous().view(-1)
    size = flat.numel()
    missing = _aligned_size(size, torch.get_num_threads()) - size
    if missing:
        flat = F.pad(flat, (0, missing))
    return function(flat)[:size].view(x.shape)


def _aligned_size(size: int, threads: int) -> int:
    """The least size, from `size` on, that PyTorch splits among its threads into whole vector blocks."""
    while True:
        unit = VECTOR_BLOCK * min(threads, -(-size // GRAIN) or 1)
        if size % unit == 0:
            return size
        size += -size % unit


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, eps: float, flags: int | NormFlags) -> Tensor:
    """The norm of the last dimension, times weight, plus bias."""
    width = x.shape[-1]
    if flags & NormFlags.LAYER_NORM:
        return F.layer_norm(x, (width,), weight, bias, eps)
    out = x.to(torch.float32, copy=True)
    size = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
    out.mul_(size.square_().div_(width).add_(eps).rsqrt_())
    if flags & NormFlags.ROUND_FIRST:
        out = out.to(x.dtype)
    if weight is not None:
        out.mul_(weight.float() + 1 if flags & NormFlags.PLUS_ONE else weight)
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype)


def turn(
    q: Tensor,  # [tokens, query_heads, head_dim]
    k: Tensor,  # [tokens, kv_heads, head_dim]
    rotation: tuple[Tensor, Tensor] | None,  # cos and sin [tokens, rotary_dim]
    *,
    norms: tuple[Tensor, Tensor] | None = None,  # of each query and each key head [head_dim]
    flags: int | NormFlags = 0,
    eps: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Norm and rotate queries and keys in place."""
    if norms is not None:
        for heads, weight in zip((q, k), norms, strict=True):
            heads.copy_(norm(heads, weight, eps=eps, flags=flags))
    if rotation is None:
        return
    cos, sin = rotation[0][:, None], rotation[1][:, None].clone()
    _pairs(sin, interleaved)[0].neg_()
    for heads in (q, k):
        turned = heads[..., : cos.shape[-1]]
        first, second = _pairs(turned, interleaved)
        partners = torch.stack((second, first), -1).flatten(-2) if interleaved else torch.cat((second, first), -1)
        turned.mul_(cos).add_(partners.mul_(sin))


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """The numbers [..., n] that are turned together, two views [..., n / 2]: neighbours, or those half of `n` apart."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new tokens: `key`, `value` [num_tokens, kv_heads, head_dim] to `slot_mapping` [num_tokens], int64.

    A slot is block * page_size + offset in the caches [num_blocks, page_size, kv_heads, head_dim], which may be views.
    Block 0 is the NULL block: it must stay zero, so no token may be sent there.
    """
    layout = KVLayout.of(key_cache)
    block, offset = slot_mapping // layout.page_size, slot_mapping % layout.page_size
    rows = block * layout.block_stride + offset * layout.token_stride
    for new, cache in ((key, key_cache), (value, value_cache)):
        _rows(cache).index_copy_(0, rows, new.flatten(1))


def paged_attention(
    query: Tensor,  # [num_tokens, query_heads, head_dim], packed as the plan has it
    key_cache: Tensor,  # [num_blocks, page_size, kv_heads, head_dim], the new tokens stored; may be a view
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None,  # [query_heads], a logit more in each head's softmax, with no value
) -> Tensor:
    """Causal attention of each new token over its own request's cache: [num_tokens, query_heads, head_dim]."""
    if query.shape[0] != plan.num_tokens:
        raise ValueError(f"the plan is for {plan.num_tokens} tokens, the query has {query.shape[0]}")
    keys, values = _rows(key_cache), _rows(value_cache)
    out = torch.empty(query.shape, dtype=query.dtype)
    for part in plan.slices:
        tile = _attend(query, keys, values, part, plan, scale, softcap, sinks)
        out.index_copy_(0, part.tokens, tile)
    return out


def _rows(cache: Tensor) -> Tensor:
    """The cache as [rows, kv_heads * head_dim], a row every `head_dim` numbers, as the plan counts them."""
    _, _, heads, head_dim = cache.shape
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:2], cache.stride()[:2], strict=True))
    return cache.as_strided((last // head_dim + 1, heads * head_dim), (head_dim, 1))


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: AttentionSlice,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one slice: [query_tiles * query_tile, query_heads, head_dim]."""
    heads, dim, scratch = plan.layout.num_kv_heads, plan.layout.head_dim, plan.scratch
    tiles, pairs, size = part.active[0], len(part.pair_tile), part.query_tile
    groups = query.shape[1] // heads
    lanes = groups if size % ROW_MULTIPLE == 0 else groups + -groups % ROW_MULTIPLE
    batch, rows = pairs * heads, lanes * size

    tile = query.index_select(0, part.tokens).view(tiles, size, heads, groups, dim).permute(0, 2, 3, 1, 4)
    tile = _pad_lanes(tile, lanes).reshape(tiles, -1).float().mul_(scale)
    pair_query = scratch.take("query", (pairs, tile.shape[1]), torch.float32)
    torch.index_select(tile, 0, part.pair_tile, out=pair_query)
    scores = scratch.take("scores", (batch, rows, KEY_TILE), torch.float32)
    torch.bmm(pair_query.view(batch, rows, dim), _gather(keys, part, plan).transpose(1, 2), out=scores)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(pairs, heads * lanes, size * KEY_TILE).add_(part.bias)

    # Each pair's weights add up to one by themselves. Beside the query's other pairs they count by their largest
    # exponential, over its weight.
    weights = scratch.take("weights", scores.shape, torch.float32)
    torch.softmax(scores, -1, out=weights)
    share = scores.amax(-1).view(pairs, -1)
    peak = _fold(torch.maximum, share, part.active)
    if sinks is not None:
        sink = sinks.float().view(1, heads, groups, 1, 1).expand(tiles, -1, -1, size, -1)
        sink = _pad_lanes(sink, lanes).reshape(tiles, -1)
        peak = torch.maximum(peak, sink)
    share.sub_(peak.index_select(0, part.pair_tile)).exp_().div_(weights.amax(-1).view(pairs, -1))
    total = _fold(torch.add, share, part.active)
    if sinks is not None:
        total.add_(sink.sub(peak).exp_())

    width = max(dim, MIN_COLUMNS)
    seen = _gather(values, part, plan)
    sums = scratch.take("sums", (batch, rows, width), torch.float32)
    torch.bmm(weights, F.pad(seen, (0, width - dim)) if width > dim else seen, out=sums)
    sums.mul_(share.view(batch, rows, 1))
    result = _fold(torch.add, sums.view(pairs, -1), part.active).view(tiles, heads, lanes, size, width)
    result = result.div_(total.view(tiles, heads, lanes, size, 1))[:, :, :groups, :, :dim].permute(0, 3, 1, 2, 4)
    return result.reshape(tiles * size, heads * groups, dim).to(query.dtype)


def _pad_lanes(tile: Tensor, lanes: int) -> Tensor:
    """`tile` [tiles, heads, groups, size, n] with zeros up to [tiles, heads, lanes, size, n]."""
    groups = tile.shape[2]
    return tile if groups == lanes else F.pad(tile, (0, 0, 0, 0, 0, lanes - groups))


def _gather(rows: Tensor, part: AttentionSlice, plan: AttentionPlan) -> Tensor:
    """The keys or values of each pair and head, float32 [pairs * kv_heads, KEY_TILE, head_dim]."""
    heads, dim, scratch = plan.layout.num_kv_heads, plan.layout.head_dim, plan.scratch
    gathered = scratch.take("gathered", (len(part.rows), heads * dim), rows.dtype)
    torch.index_select(rows, 0, part.rows, out=gathered)
    tiles = scratch.take("tiles", (len(part.rows) // KEY_TILE, heads, KEY_TILE, dim), torch.float32)
    tiles.copy_(gathered.view(-1, KEY_TILE, heads, dim).transpose(1, 2))
    return tiles.view(-1, KEY_TILE, dim)


def _fold(combine: Callable[..., Tensor], pairs: Tensor, active: tuple[int, ...]) -> Tensor:
    """Combine each query tile's pairs [pairs, n], one key tile after the other: [query_tiles, n]."""
    result = pairs[: active[0]].clone()
    start = active[0]
    for count in active[1:]:
        combine(result[:count], pairs[start : start + count], out=result[:count])
        start += count
    return result
