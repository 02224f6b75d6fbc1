"""Which tokens may be drawn, and the draw.

z: [num_rows, vocab] float32, the row's logits over its temperature, its largest at 0; a removed token is at -inf.
A token's weight is the integer part of `exp(z) * 2**40`. Sums of integers do not depend on their order, so neither the
shape of a reduction nor the other rows reach a row's result. A row with NaN gets some token; the caller refuses it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from chairlift.kernels import Native
from chairlift.sample.tensors import pick, to_device

_CHUNK = 128  # entries that the first level of the draw sums up
_SHORTLISTS = (64, 256)  # widths
_HEAD = 64  # most likely tokens among which a nucleus is looked for before the whole row is sorted
_MOST_SELECTED = 256  # up to here selecting the k largest is faster than sorting the row
_UNIT = float(1 << 40)
_WEIGHTLESS = -32.0


class Candidates(NamedTuple):
    """The tokens among which some rows are drawn."""

    rows: NDArray[np.intp]
    logits: Tensor  # [len(rows), width]
    ids: Tensor | None  # [len(rows), width] int64, ascending; None: the columns are the token ids


def are_short(k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows `candidates` will try to cut; k: as there."""
    return (k > 0) & (k < _SHORTLISTS[-1])


def candidates(logits: Tensor, k: NDArray[np.int64], kernels: Native | None = None) -> Iterator[Candidates]:
    """Cut rows with a small top_k down to their largest logits, so that all that follows looks at few tokens.

    logits: [num_rows, vocab]; k: [num_rows], 0 for all tokens. Whether a row is cut, and to which width, depends on
    that row alone: not one whose k-th largest logit may have equals beyond the cut. A GPU is not asked which these
    are, it takes whole rows.
    """
    whole = np.full(len(k), True)
    for width in _SHORTLISTS:
        fitting = np.flatnonzero(whole & (k > 0) & (k < width))
        if not len(fitting) or width >= logits.shape[-1] or not logits.is_cpu:
            continue
        part = pick(logits, fitting)
        largest, ids = part.topk(width, dim=-1) if kernels is None else kernels.largest(part, width)
        floor = largest.gather(1, to_device(k[fitting] - 1, logits.device)[:, None])
        clear = np.flatnonzero((largest[:, -1:] < floor).numpy())
        if len(clear):
            ids, order = pick(ids, clear).sort(-1)
            whole[fitting[clear]] = False
            yield Candidates(fitting[clear], pick(largest, clear).gather(1, order), ids)
    rest = np.flatnonzero(whole)
    if len(rest):
        yield Candidates(rest, pick(logits, rest), None)


def centred(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits: [num_rows, vocab] float32; temperature: [num_rows]. Returns z."""
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def weights(z: Tensor) -> Tensor:
    """The weight of each entry of z: int64 of its shape."""
    # Below the bound the weight is 0 in any case, and `exp` of an infinity takes four times as long.
    return z.clamp(min=_WEIGHTLESS).exp_().mul_(_UNIT).to(torch.int64)


def keep_from(z: Tensor, floor: Tensor) -> None:
    """Remove, in place, what lies below the row's floor; floor: [num_rows]."""
    z.masked_fill_(z < floor[:, None], -torch.inf)


def top_k(z: Tensor, k: NDArray[np.int64]) -> None:
    """Keep, in place, the k largest entries of each row and those equal to the smallest of them, as `generate` does."""
    k = np.minimum(k, z.shape[-1])
    column = to_device(k - 1, z.device)[:, None]
    most = int(k.max())
    largest = z.topk(most, dim=-1).values if most <= _MOST_SELECTED else _descending(z)
    keep_from(z, largest.gather(1, column)[:, 0])


def top_p(z: Tensor, mass: NDArray[np.float64]) -> None:
    """Keep, in place, the fewest most likely tokens with at least this share of the row's weight.

    Among equals at the edge the higher token ids stay, as in `generate`.
    """
    target = _share(weights(z).sum(-1), mass)
    largest = z.topk(min(_HEAD, z.shape[-1]), dim=-1).values if z.is_cpu else _descending(z)
    size = _nucleus_size(weights(largest), target)
    floor, num_tied, is_cut = _edge(largest, size)
    if largest.shape != z.shape:
        wider = (size == largest.shape[-1]).nonzero()[:, 0]
        if len(wider):
            largest = _descending(z[wider])
            size = _nucleus_size(weights(largest), target[wider])
            floor[wider], num_tied[wider], is_cut[wider] = _edge(largest, size)
    keep_from(z, floor)
    # On a GPU it costs less to look at all rows than to ask which ones to look at.
    cut = is_cut.nonzero()[:, 0] if z.is_cpu else torch.arange(len(z), device=z.device)
    if len(cut):
        part = z[cut]
        ties = part == floor[cut, None]
        rank_from_the_end = ties.flip(-1).cumsum(-1).flip(-1)
        z[cut] = part.masked_fill_(ties & (rank_from_the_end > num_tied[cut, None]), -torch.inf)


def min_p(z: Tensor, floor: NDArray[np.float32]) -> None:
    """Keep, in place, what is at least this likely beside the most likely token, which is at 0; floor: a logarithm."""
    keep_from(z, to_device(floor, z.device))


def typical_p(z: Tensor, mass: NDArray[np.float64]) -> None:
    """Keep, in place, the tokens whose information is nearest to the row's entropy, up to this share of its weight.

    The most likely token may be removed; the largest that stays moves to 0.
    """
    information = -z.log_softmax(-1)
    terms = (information * (-information).exp()).nan_to_num_(nan=0.0)
    entropy = (terms * _UNIT).to(torch.int64).sum(-1).to(torch.float32) / _UNIT
    distance = information.sub_(entropy[:, None]).abs_()
    order = _argsort(distance)
    weight = weights(z).gather(-1, order)
    size = _nucleus_size(weight, _share(weight.sum(-1), mass))
    edge = distance.gather(-1, order.gather(-1, size[:, None] - 1))
    z.masked_fill_(distance > edge, -torch.inf)
    z.sub_(z.amax(-1, keepdim=True))


def draw(z: Tensor, uniform: Tensor) -> Tensor:
    """One token per row by its weights: the first whose running sum exceeds `uniform` of the total.

    uniform: [num_rows] float64 in [0, 1). Returns [num_rows] int64.
    """
    num_rows, vocab = z.shape
    weight = weights(z)
    if vocab % _CHUNK:
        weight = F.pad(weight, (0, -vocab % _CHUNK))
    chunks = weight.view(num_rows, -1, _CHUNK)
    chunk_weight = chunks.sum(-1)
    running = chunk_weight.cumsum(-1)
    total = running[:, -1]
    point = torch.minimum((uniform * total).to(torch.int64), total - 1)[:, None]
    chunk = (running <= point).sum(-1, keepdim=True).clamp_(max=chunks.shape[1] - 1)
    point = point - running.gather(1, chunk) + chunk_weight.gather(1, chunk)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK))[:, 0].cumsum(-1)
    entry = (inside <= point).sum(-1)
    return (chunk[:, 0] * _CHUNK + entry).clamp_(max=vocab - 1)


def _share(total: Tensor, mass: NDArray[np.float64]) -> Tensor:
    """At least this share of a total: [num_rows] int64."""
    return (total.to(torch.float64) * to_device(mass, total.device)).ceil().to(torch.int64)


def _nucleus_size(ordered: Tensor, target: Tensor) -> Tensor:
    """How many of the leading weights are needed for the target, at least one: [num_rows] int64."""
    before = ordered.cumsum(-1) - ordered
    return (before < target[:, None]).sum(-1).clamp_(min=1)


def _edge(largest: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """largest: [num_rows, n] descending, of which `size` stay. Returns the smallest that stays, how many equal to it
    stay, and whether some equal to it do not."""
    last = size[:, None] - 1
    floor = largest.gather(-1, last)
    num_tied = size - (largest > floor).sum(-1)
    is_cut = (largest.gather(-1, (last + 1).clamp_(max=largest.shape[-1] - 1)) == floor)[:, 0]
    return floor[:, 0], num_tied, is_cut & (size < largest.shape[-1])


def _descending(z: Tensor) -> Tensor:
    """The rows sorted, largest first. On a CPU by NumPy, which is 15 times as fast at it as PyTorch."""
    if z.is_cpu:
        return torch.from_numpy(-np.sort(-z.numpy(), axis=-1))
    return z.sort(dim=-1, descending=True).values


def _argsort(values: Tensor) -> Tensor:
    """Indices that sort the rows, smallest first; equal values come in any order."""
    if values.is_cpu:
        return torch.from_numpy(np.argsort(values.numpy(), axis=-1))
    return values.argsort(dim=-1)
