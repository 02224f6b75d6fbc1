"""Blocks as tensors: views, copies, swaps, and memory that is taken only when used."""

import resource
import sys

import pytest
import torch

from chairlift.cache.layout import CacheLayout, LayerSpec, plan_layout
from chairlift.cache.storage import KVStorage
from chairlift.cache.table import BlockCopy

CPU = torch.device("cpu")
UNIFORM = [LayerSpec(index=i, window=None, num_kv_heads=2, head_dim=4) for i in range(3)]
MIXED = [  # the sliding layers are smaller than the full ones
    LayerSpec(index=i, window=8 if i % 2 else None, num_kv_heads=1 if i % 2 else 2, head_dim=4) for i in range(4)
]


def make_storage(
    layers: list[LayerSpec], dtype: torch.dtype = torch.float32, num_blocks: int = 6, num_host_blocks: int = 3
) -> KVStorage:
    return KVStorage(plan_layout(layers, 4, dtype.itemsize), layers, num_blocks, num_host_blocks, dtype, CPU)


def fill(storage: KVStorage, layers: list[LayerSpec]) -> None:
    """Different numbers in every block but the null block; layers of one storage are told apart by position."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers[:2]:
        for tensor in (storage.key(layer.index), storage.value(layer.index)):
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_uniform_model_can_be_indexed_by_slot(dtype: torch.dtype) -> None:
    storage = make_storage(UNIFORM, dtype)
    for layer in UNIFORM:
        for tensor in (storage.key(layer.index), storage.value(layer.index)):
            assert tensor.shape == (7, 4, 2, 4)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert not tensor.any()
            assert tensor.data_ptr() % 64 == 0
    storage.key(1).view(-1, 2, 4)[5 * 4 + 3] = 1
    assert storage.key(1)[5, 3].eq(1).all()
    assert storage.key(1).sum() == 8
    assert not any(t.any() for t in (storage.key(0), storage.key(2), storage.value(0), storage.value(1)))


def test_a_smaller_layer_uses_the_first_part_of_its_page() -> None:
    storage = make_storage(MIXED)
    assert storage.key(0).shape == (7, 4, 2, 4)
    assert storage.key(1).shape == storage.value(1).shape == (7, 4, 1, 4)
    assert storage.key(0).stride(0) == storage.key(1).stride(0) == storage.value(1).stride(0) == 32
    assert storage.key(1)[0].is_contiguous()
    assert storage.key(0).data_ptr() == storage.key(1).data_ptr(), "different groups, one storage: told apart by block"
    assert storage.key(0).data_ptr() != storage.key(2).data_ptr()


def test_nbytes_is_what_the_layout_says() -> None:
    layout = plan_layout(UNIFORM, 4, 2)
    assert make_storage(UNIFORM, torch.bfloat16).nbytes == 7 * layout.block_bytes


@pytest.mark.parametrize("layers", [UNIFORM, MIXED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_run_in_order(layers: list[LayerSpec], dtype: torch.dtype) -> None:
    storage = make_storage(layers, dtype)
    fill(storage, layers)
    before = [storage.key(layer.index).clone() for layer in layers]
    storage.copy([BlockCopy("copy", 1, 2, 4), BlockCopy("copy", 2, 3, 4), BlockCopy("copy", 4, 1, 4)])
    for layer, old in zip(layers, before, strict=True):
        new = storage.key(layer.index)
        assert new[2].equal(old[1])
        assert new[3].equal(old[1])
        assert new[1].equal(old[4])
        assert new[4:].equal(old[4:])
        assert not new[0].any()


@pytest.mark.parametrize("layers", [UNIFORM, MIXED])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_partial_copy_brings_the_first_tokens_of_every_layer(layers: list[LayerSpec], num_tokens: int) -> None:
    storage = make_storage(layers)
    fill(storage, layers)
    last = storage.value(0)[2, 3].clone()
    storage.copy([BlockCopy("copy", 1, 2, num_tokens)])
    for layer in layers:
        for tensor in (storage.key(layer.index), storage.value(layer.index)):
            assert tensor[2, :num_tokens].equal(tensor[1, :num_tokens])
    assert storage.value(0)[2, 3].equal(last), "what lies behind is left alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swaps_bring_every_layer_back(dtype: torch.dtype) -> None:
    storage = make_storage(UNIFORM, dtype)
    fill(storage, UNIFORM)
    keys, values = storage.key(1)[3].clone(), storage.value(1)[5].clone()
    storage.copy([BlockCopy("swap_out", 3, 1, 4), BlockCopy("swap_out", 5, 3, 4)])
    storage.key(1)[1:] = 0
    storage.value(1)[1:] = 0
    storage.copy(
        [BlockCopy("swap_in", 1, 6, 4), BlockCopy("swap_out", 4, 1, 4), BlockCopy("swap_in", 3, 2, 4)]
    )  # a host block is free again once it was read
    assert storage.key(1)[6].equal(keys)
    assert storage.value(1)[2].equal(values)
    assert not storage.key(1)[0].any()


def test_memory_is_taken_when_it_is_written_to() -> None:
    layout: CacheLayout = plan_layout(UNIFORM, 4, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    storage = make_storage(UNIFORM, num_blocks=2**30 // layout.block_bytes)
    storage.key(2)[1:100] = 1
    assert storage.nbytes > 2**30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 2**28
