"""The tensors behind the blocks.

All storages are one tensor of pages, `[num_storages, 2, 1 + num_blocks, elements of half a page]`, keys apart from
values: a copy of a block is one operation whatever the number of layers, and the keys of a layer that fills its page
are contiguous over all blocks. Block 0 is the null block: it is never written and stays zero. Knows no sequence.
"""

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from chairlift.cache.layout import CacheLayout, LayerSpec
from chairlift.cache.table import BlockCopy


class KVStorage:
    """Keys and values of all blocks on one device, and of swapped-out blocks in host memory."""

    def __init__(
        self,
        layout: CacheLayout,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        unit: int = 0,
    ) -> None:
        """`unit`: 0 keeps keys apart from values; kernels with a layout of their own fill a page unit after unit, keys
        and values of `unit` tokens together."""
        planes = 1 if unit else 2
        elements = layout.page_bytes // (planes * dtype.itemsize)
        self._token_elements = elements // layout.page_size
        self._unit = unit or 1
        self._pages = _zeros((layout.num_storages, planes, 1 + num_blocks, elements), dtype, device)
        # In host memory a block is contiguous, so that a swap is one transfer.
        self._host = _host_memory((1 + num_host_blocks, layout.num_storages, planes, elements), dtype, device)
        self._storage_of = {layer.index: layout.place(layer.index)[1] for layer in layers}
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in layers if planes == 2 else ():
            storage = self._storage_of[layer.index]
            used = layout.page_size * layer.num_kv_heads * layer.head_dim
            shape = (1 + num_blocks, layout.page_size, layer.num_kv_heads, layer.head_dim)
            keys, values = self._pages[storage, :, :, :used]
            self._views[layer.index] = keys.view(shape), values.view(shape)

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes; on a CPU only what was written to is committed."""
        return self._pages.nbytes

    def pages(self, layer: int) -> Tensor:
        """All pages of a layer, `[1 + num_blocks, elements]`, in the layout of the kernels; only with a `unit`."""
        return self._pages[self._storage_of[layer], 0]

    def key(self, layer: int) -> Tensor:
        """Keys of a layer, `[1 + num_blocks, page_size, num_kv_heads, head_dim]`; dimension 0 is the block id.

        Contiguous when the layer is as large as the largest, otherwise with a larger stride between blocks.
        """
        return self._views[layer][0]

    def value(self, layer: int) -> Tensor:
        """Values of a layer, of the same shape and strides as its keys."""
        return self._views[layer][1]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Execute copies one after the other, each seeing what those before it wrote."""
        for kind, source, target, num_tokens in copies:
            elements = -(-num_tokens // self._unit) * self._unit * self._token_elements
            match kind:
                case "copy":
                    self._device(target, elements).copy_(self._device(source, elements))
                case "swap_out":
                    self._host[target, ..., :elements].copy_(self._device(source, elements), non_blocking=True)
                case "swap_in":
                    self._device(target, elements).copy_(self._host[source, ..., :elements], non_blocking=True)

    def _device(self, block: int, elements: int) -> Tensor:
        """The beginning of a block's pages, `[num_storages, 2, elements]`."""
        return self._pages[:, :, block, :elements]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only once they are written to (`torch.zeros` writes to all of it)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory to swap to; pinned for a GPU, so that swaps do not hold up the host."""
    if device.type == "cuda":
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return _zeros(shape, dtype, torch.device("cpu"))
