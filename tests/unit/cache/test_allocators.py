"""Which blocks a window needs, against the definition: position j is seen from position i if i - window < j <= i."""

import pytest

from chairlift.cache.allocators import NEVER, FullAttentionAllocator, SlidingWindowAllocator


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_sliding_window(page_size: int, window: int) -> None:
    allocator = SlidingWindowAllocator(page_size, window)
    for num_computed in range(40):
        seen = [j for j in range(60) if any(i - window < j <= i for i in range(num_computed, 60))]
        first = allocator.first_block(num_computed)
        assert first == seen[0] // page_size
        assert allocator.expires_at(first) > num_computed
        assert first == 0 or allocator.expires_at(first - 1) <= num_computed


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
@pytest.mark.parametrize("chunk", [1, 2, 5, 30])
def test_a_sliding_sequence_never_holds_more_than_its_peak_and_may_reach_it(
    page_size: int, window: int, chunk: int
) -> None:
    allocator = SlidingWindowAllocator(page_size, window)
    held = [
        -(-min(start + chunk, 60) // page_size) - allocator.first_block(start) for start in range(60)
    ]  # from any start, as after a prefix hit
    assert max(held) == allocator.peak_blocks(60, chunk)


def test_full_attention_hands_nothing_back() -> None:
    allocator = FullAttentionAllocator(4)
    assert allocator.first_block(1000) == 0
    assert allocator.expires_at(0) == NEVER
    assert [allocator.peak_blocks(n, 8) for n in (1, 4, 5)] == [1, 1, 2]
