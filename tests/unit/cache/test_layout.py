"""How layers share blocks, in numbers."""

import pytest

from chairlift.cache.layout import LayerSpec, plan_layout


def layers(*windows: int | None, heads: int = 2, dim: int = 8) -> list[LayerSpec]:
    return [LayerSpec(index=i, window=w, num_kv_heads=heads, head_dim=dim) for i, w in enumerate(windows)]


def test_layers_of_one_kind_are_one_group() -> None:
    layout = plan_layout(layers(*[None] * 30), page_size=16, itemsize=2)
    assert [group.layers for group in layout.groups] == [tuple(range(30))]
    assert layout.page_bytes == 2 * 16 * 2 * 8 * 2
    assert layout.block_bytes == 30 * layout.page_bytes
    assert layout.place(7) == (0, 7)


@pytest.mark.parametrize(
    ("sliding", "full", "size", "num_groups"),
    [
        (1, 1, 1, 2),
        (13, 13, 13, 2),  # alternating, as Gemma 2
        (22, 4, 4, 7),  # 28 pages for 26 layers; groups of 11 would waste 7 pages
        (20, 4, 5, 5),  # one unused page in 25
        (5, 3, 1, 8),  # every larger size wastes at least 1 page in 8
        (18, 0, 18, 1),
    ],
)
def test_groups_are_as_large_as_a_tenth_of_padding_allows(sliding: int, full: int, size: int, num_groups: int) -> None:
    specs = layers(*[512] * sliding, *[None] * full)
    layout = plan_layout(specs, page_size=16, itemsize=2)
    assert layout.num_storages == size
    assert len(layout.groups) == num_groups
    assert layout.num_storages * num_groups <= 1.1 * len(specs)
    places = [layout.place(layer.index) for layer in specs]
    assert len(set(places)) == len(specs), "two layers share a page"
    assert all(layout.groups[group].window == layer.window for (group, _), layer in zip(places, specs, strict=True))


def test_a_page_has_room_for_the_largest_layer() -> None:
    specs = [*layers(None, heads=8, dim=16), LayerSpec(index=1, window=None, num_kv_heads=4, head_dim=64)]
    assert plan_layout(specs, page_size=4, itemsize=4).page_bytes == 2 * 4 * 4 * 64 * 4


def test_a_layer_without_a_cache_has_no_place() -> None:
    with pytest.raises(KeyError, match="layer 9 has no place"):
        plan_layout(layers(None), page_size=16, itemsize=2).place(9)


@pytest.mark.parametrize(
    ("num_tokens", "chunk", "needed"),
    [
        (4, 8, 2),  # one full and one sliding page
        (5, 8, 4),
        (100, 1, 25 + 2),  # a window of 4 in pages of 4 touches two pages
        (100, 2, 25 + 2),
        (100, 3, 25 + 3),  # positions n - 3 ... n + 2 are six, which may touch three pages
        (100, 1000, 25 + 25),
    ],
)
def test_blocks_needed(num_tokens: int, chunk: int, needed: int) -> None:
    assert plan_layout(layers(None, 4), page_size=4, itemsize=2).blocks_needed(num_tokens, chunk) == needed
