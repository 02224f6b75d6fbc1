"""What the scheduler may rely on, one promise at a time. That nothing is ever mixed up is in property/test_cache.py."""

import pytest

from chairlift.cache.cache import KVCache, Match
from chairlift.cache.layout import LayerSpec, plan_layout
from chairlift.cache.table import NULL_BLOCK, BlockCopy, SequenceKV


def make_cache(*windows: int | None, page_size: int = 4, num_blocks: int = 64, num_host_blocks: int = 0) -> KVCache:
    layers = [LayerSpec(index=i, window=w, num_kv_heads=1, head_dim=1) for i, w in enumerate(windows)]
    return KVCache(plan_layout(layers, page_size, 2), num_blocks, num_host_blocks)


def prefill(cache: KVCache, tokens: list[int], step: int = 0, salt: bytes = b"") -> SequenceKV:
    """A sequence that computed all of `tokens` in one step."""
    kv = cache.new(salt)
    match = cache.match(kv, tokens, step)
    assert cache.reserve(kv, match.num_tokens, len(tokens))
    cache.commit(kv, tokens, len(tokens), step, tail=True)
    return kv


def hit(cache: KVCache, tokens: list[int], step: int = 1, salt: bytes = b"") -> int:
    """Tokens that a match would take, which is undone."""
    kv = cache.new(salt)
    match = cache.match(kv, tokens, step)
    cache.release(kv)
    return match.num_tokens


PROMPT = list(range(100, 110))  # two full pages of 4, and 2 tokens


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_a_hit_covers_all_but_the_last_token(windows: tuple[int | None, ...], length: int) -> None:
    cache = make_cache(*windows)
    tokens = PROMPT[:length]
    cache.release(prefill(cache, tokens))
    assert hit(cache, tokens) == length - 1
    assert hit(cache, [*tokens, 1, 2]) == length
    assert hit(cache, [*tokens[:-1], 1, 2]) == length - 1
    assert hit(cache, [1, *tokens]) == 0


def test_one_token_never_hits() -> None:
    cache = make_cache(None)
    cache.release(prefill(cache, [7, 8]))
    assert cache.match(cache.new(b""), [7], 1) == Match()


def test_full_blocks_are_shared_and_what_follows_is_copied() -> None:
    cache = make_cache(None)
    first = prefill(cache, PROMPT)
    second = cache.new(b"")
    match = cache.match(second, [*PROMPT[:9], 1, 2], 1)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert match == Match(9, (BlockCopy("copy", first.tables[0][2], second.tables[0][2], 1),))
    assert cache.usage.used == 4
    cache.check([first, second])


def test_a_page_size_beyond_the_prompt_reuses_by_token() -> None:
    """The second turn of a chat goes on behind the first, in pages that hold hundreds of tokens."""
    cache = make_cache(None, page_size=256)
    kv = prefill(cache, PROMPT)
    answer = [*PROMPT, 1, 2, 3]
    assert cache.reserve(kv, len(PROMPT), len(answer))
    cache.commit(kv, answer, len(answer) - 1, 1, tail=True)
    cache.release(kv)
    assert hit(cache, [*answer, 4, 5, 6], step=2) == len(answer) - 1


def test_prompts_of_one_step_share_whole_blocks_but_not_what_would_be_copied() -> None:
    cache = make_cache(None)
    first = prefill(cache, PROMPT, step=5)
    second = cache.new(b"")
    assert cache.match(second, PROMPT, 5) == Match(8)
    assert second.tables[0] == first.tables[0][:2]
    assert hit(cache, PROMPT, step=6) == 9


def test_waiting_a_step_is_advised_when_it_saves_much() -> None:
    tokens = list(range(40))
    cache = make_cache(None, page_size=64)
    first = prefill(cache, tokens, step=0)
    second = cache.new(b"")
    assert cache.match(second, tokens, 0) == Match(wait=True)
    assert not second.tables[0]
    assert not cache.match(cache.new(b""), tokens[:16], 0).wait, "only 15 tokens to gain"
    assert cache.match(second, tokens, 1).num_tokens == 39
    cache.check([first, second])


def test_other_salts_share_nothing() -> None:
    cache = make_cache(None)
    cache.release(prefill(cache, PROMPT, salt=b"a"))
    assert hit(cache, PROMPT, salt=b"b") == 0
    assert hit(cache, PROMPT, salt=b"a") == 9


def test_same_content_computed_twice_is_kept_once() -> None:
    cache = make_cache(None)
    twins = [cache.new(b""), cache.new(b"")]
    for kv in twins:
        assert cache.match(kv, PROMPT, 0) == Match()
    for kv in twins:
        assert cache.reserve(kv, 0, len(PROMPT))
        cache.commit(kv, PROMPT, len(PROMPT), 0, tail=True)
    cache.check(twins)
    for kv in twins:
        cache.release(kv)
    assert (cache.usage.cached, cache.usage.free) == (3, 61)
    assert hit(cache, PROMPT) == 9


def test_without_keep_only_living_relatives_share() -> None:
    cache = make_cache(None)
    parent = prefill(cache, PROMPT, salt=b"request 1")
    child = cache.new(b"request 1")
    assert cache.match(child, PROMPT, 1).num_tokens == 9
    cache.release(parent, keep=False)
    assert cache.usage.cached == 0
    assert hit(cache, PROMPT, salt=b"request 1") == 8, "the child still holds the full blocks"
    cache.release(child, keep=False)
    assert cache.usage.free == 64


@pytest.mark.parametrize("length", [3, 4, 5, 9])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_a_window_is_held_and_the_rest_handed_back(length: int, page_size: int) -> None:
    """Window 4, chunks of 8, then 20 tokens one by one."""
    cache = make_cache(4, page_size=page_size)
    tokens = list(range(length + 20))
    kv = cache.new(b"")
    cache.match(kv, tokens[:length], 0)
    computed, most = 0, cache.layout.blocks_needed(len(tokens), 8)
    for step in range(100):
        upto = min(computed + 8, length) if computed < length else computed + 1
        assert cache.reserve(kv, computed, upto)
        cache.commit(kv, tokens, upto, step)
        for position in range(max(0, computed - 3), upto):
            assert kv.tables[0][position // page_size] != NULL_BLOCK
        behind = max(0, computed - 3) // page_size
        assert kv.tables[0][:behind] == [NULL_BLOCK] * behind
        assert cache.usage.used == len(kv.tables[0]) - behind <= most
        computed = upto
        if computed == len(tokens):
            break
    assert computed == len(tokens)
    cache.release(kv)
    assert cache.num_available == 64


def test_a_hybrid_match_needs_only_the_window_in_sliding_groups() -> None:
    cache = make_cache(None, 6)
    tokens = list(range(26))
    kv = prefill(cache, tokens)
    assert cache.reserve(kv, 26, 27)  # hands back what lies behind the window
    cache.release(kv)
    other = cache.new(b"")
    assert cache.match(other, [*tokens, 1], 1).num_tokens == 26
    assert all(block != NULL_BLOCK for block in other.tables[0])
    assert [block != NULL_BLOCK for block in other.tables[1]] == [False] * 5 + [True] * 2
    assert cache.match(cache.new(b""), tokens, 1).num_tokens == 25
    cache.check()


def test_a_hybrid_match_falls_back_to_where_every_group_can_go_on() -> None:
    cache = make_cache(None, 4, num_blocks=20)
    tokens = list(range(24))
    cache.release(prefill(cache, tokens))  # 6 blocks per group, released tail first
    filler = cache.new(b"filler")
    assert cache.reserve(filler, 0, 4 * 5)  # takes the 8 free blocks, and evicts the last block of either group
    assert hit(cache, [*tokens, 1]) == 20


def test_reserve_takes_all_or_nothing() -> None:
    cache = make_cache(None, None, page_size=4, num_blocks=5)
    kv = cache.new(b"")
    assert not cache.reserve(kv, 0, 21)
    assert cache.num_available == 5
    assert cache.reserve(kv, 0, 20)
    assert cache.blocks_missing(kv, 21) == 1
    assert not cache.reserve(kv, 0, 21)
    assert len(kv.tables[0]) == 5
    cache.check([kv])


def test_a_match_without_room_for_a_copy_still_shares_whole_blocks() -> None:
    cache = make_cache(None, num_blocks=3)
    cache.release(prefill(cache, PROMPT))
    kv = cache.new(b"")
    assert cache.match(kv, [*PROMPT, 1], 1) == Match(8)
    assert cache.reserve(kv, 8, 11)
    cache.check([kv])


def test_a_burst_evicts_only_what_it_needs_the_oldest_first() -> None:
    cache = make_cache(None, num_blocks=12)
    system = list(range(16))  # 4 blocks that every request begins with
    for step, user in enumerate((100, 200)):
        cache.release(prefill(cache, [*system, *range(user, user + 4)], step))
    assert cache.usage.cached == 6
    burst = [cache.new(b"") for _ in range(8)]
    prompts = [[i, i, i, i] for i in range(500, 508)]
    for kv, tokens in zip(burst, prompts, strict=True):
        assert cache.reserve(kv, 0, 4)
        cache.commit(kv, tokens, 4, 2)
    assert cache.usage.cached == 4, "6 free blocks, so 2 of 8 were evicted"
    assert hit(cache, [*system, 1], step=3) == 16
    for user in (100, 200):
        assert hit(cache, [*system, user, 1], step=3) == 16, "the ends went before the common beginning"


def test_swaps_move_everything_and_keep_the_window() -> None:
    cache = make_cache(None, 4, num_blocks=20, num_host_blocks=8)
    tokens = list(range(18))
    kv = prefill(cache, tokens)
    assert cache.swap_out(kv) is None, "10 blocks, host memory has 8"
    cache.check([kv])
    assert cache.reserve(kv, 14, 18)
    before = kv.tables
    out = cache.swap_out(kv)
    assert out is not None
    assert [copy.source for copy in out] == [block for table in before for block in table if block != NULL_BLOCK]
    assert kv.is_swapped_out
    assert (cache.usage.used, cache.usage.host_used) == (0, 8)
    cache.check([kv])

    assert cache.swap_in(kv, 18, 61) is None, "16 blocks per group"
    assert (cache.usage.used, cache.usage.host_used) == (0, 7), "the window has moved on by one block"
    back = cache.swap_in(kv, 18, 21)
    assert back is not None
    assert {copy.source for copy in back} <= {copy.target for copy in out}
    assert [len(table) for table in kv.tables] == [6, 6]
    assert (cache.usage.used, cache.usage.host_used) == (6 + 3, 0)
    cache.check([kv])


def test_what_was_swapped_in_can_be_found_again() -> None:
    cache = make_cache(None, num_blocks=4, num_host_blocks=4)
    kv = prefill(cache, PROMPT)
    cache.swap_out(kv)
    other = cache.new(b"other")
    assert cache.reserve(other, 0, 16)  # evicts all that the first had left behind
    cache.release(other)
    assert hit(cache, PROMPT) == 0
    assert cache.swap_in(kv, 10, 11) is not None
    cache.commit(kv, [*PROMPT, 1], 11, 2)
    assert hit(cache, PROMPT, step=3) == 8


def test_releasing_a_swapped_out_sequence_frees_host_memory() -> None:
    cache = make_cache(None, num_host_blocks=4)
    kv = prefill(cache, PROMPT)
    assert cache.swap_out(kv) is not None
    cache.release(kv)
    assert cache.usage.host_used == 0
    assert cache.num_available == 64
    assert cache.match(kv, PROMPT, 1).num_tokens == 9


def test_after_forget_nothing_old_is_found_and_the_living_go_on() -> None:
    cache = make_cache(None)
    living, waiting = prefill(cache, PROMPT), cache.new(b"")
    cache.release(prefill(cache, [1, 2, 3, 4, 5]))
    cache.forget()
    assert cache.usage.cached == 0
    assert cache.reserve(living, 10, 13)
    cache.commit(living, [*PROMPT, 1, 2, 3], 13, 1, tail=True)
    assert cache.match(waiting, PROMPT, 2) == Match(), "what the living computes comes from old weights"
    assert cache.reserve(waiting, 0, 10)
    cache.commit(waiting, PROMPT, 10, 2, tail=True)
    cache.release(living)
    assert hit(cache, PROMPT, step=3) == 9
    cache.check([waiting])


def test_commit_after_release_does_nothing() -> None:
    cache = make_cache(None)
    kv = prefill(cache, PROMPT)
    cache.release(kv, keep=False)
    cache.commit(kv, [*PROMPT, 1, 2], 12, 1, tail=True)
    assert hit(cache, PROMPT) == 0
    cache.check([kv])


def test_usage_counts_the_tokens_of_admitted_sequences() -> None:
    cache = make_cache(None, num_blocks=4)
    cache.release(prefill(cache, PROMPT))
    kv = cache.new(b"")
    for _ in range(3):  # tried, and put back for lack of room
        assert cache.match(kv, [*PROMPT, *range(20)], 1).num_tokens == 10
        assert not cache.reserve(kv, 10, 30)
        cache.release(kv)
    assert (cache.usage.queried_tokens, cache.usage.hit_tokens) == (10, 0)
    assert cache.reserve(kv, 0, 4)
    cache.commit(kv, [9, 9, 9, 9], 4, 1)
    assert (cache.usage.queried_tokens, cache.usage.hit_tokens) == (10, 0), "what was put back is not counted"
    cache.release(kv)
    tokens = [*PROMPT, 1, 2]
    again = prefill(cache, tokens, 2)
    assert cache.reserve(again, 12, 16)
    cache.commit(again, [*tokens, 3, 4, 5, 6], 16, 3)
    assert (cache.usage.queried_tokens, cache.usage.hit_tokens) == (22, 10), "counted once, however long it goes on"


def test_match_wants_an_empty_sequence() -> None:
    cache = make_cache(None)
    with pytest.raises(ValueError, match="release it first"):
        cache.match(prefill(cache, PROMPT), PROMPT, 1)
