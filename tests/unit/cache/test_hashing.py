"""Names of prefixes, and the index below them."""

import pytest

from chairlift.cache.hashing import Hit, PrefixIndex, chain_key, encode, num_common, root_key

ROOT = (0, root_key(b"salt", 0))


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ([], [1], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 2, 4, 3], 2),
        ([256, 1], [257, 1], 0),  # equal but for the last byte of the first token
        ([0, 0, 1 << 24], [0, 0, 2 << 24], 2),
        ([0, 0, 0], [0, 0, 0, 0], 3),
    ],
)
def test_common_beginnings_are_counted_in_tokens(a: list[int], b: list[int], common: int) -> None:
    assert num_common(encode(a), encode(b)) == num_common(encode(b), encode(a)) == common


def test_encoded_tokens_sort_like_tokens() -> None:
    contents = [[0, 5], [1], [1, 255], [1, 256], [2, 0], [70000], [70000, 1]]
    assert sorted(map(encode, contents)) == [encode(tokens) for tokens in sorted(contents)]


def test_a_key_names_salt_weights_and_everything_before() -> None:
    one, two = encode([1, 2]), encode([3, 4])
    roots = [root_key(b"", 0), root_key(b"a", 0), root_key(b"", 1), root_key(b"a", 1)]
    keys = [*roots, *(chain_key(root, one) for root in roots), chain_key(chain_key(roots[0], one), two)]
    keys += [chain_key(roots[0], two), chain_key(chain_key(roots[0], two), one)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 16 for key in keys)


def test_fresh_blocks_are_ready_in_the_next_step() -> None:
    index = PrefixIndex()
    index.begin(3)
    index.add(1, ROOT, encode([1, 2, 3]))
    assert index.longest(ROOT, encode([1, 2, 9])) == (Hit(), Hit(1, 2))
    assert index.find(ROOT, encode([1, 2, 3])) == 1, "shared whole, it is written in time"
    index.begin(3)
    assert index.longest(ROOT, encode([1, 2, 9])) == (Hit(), Hit(1, 2))
    index.begin(4)
    assert index.longest(ROOT, encode([1, 2, 9])) == (Hit(1, 2), Hit())
    index.check()


def test_a_longer_content_replaces_the_shorter_of_the_same_block() -> None:
    index = PrefixIndex()
    index.begin(0)
    index.add(1, ROOT, encode([1]))
    index.begin(1)
    index.add(1, ROOT, encode([1, 2]))
    assert len(index) == 1
    assert index.find(ROOT, encode([1])) == 0
    assert index.find(ROOT, encode([1, 2])) == 1


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    index = PrefixIndex()
    index.begin(0)
    index.add(1, ROOT, encode([1, 2]))
    index.add(2, ROOT, encode([1, 2]))
    index.add(3, ROOT, encode([1]))
    assert [block in index for block in (1, 2, 3)] == [True, False, False]
    index.discard(2)
    assert index.find(ROOT, encode([1, 2])) == 1


def test_the_best_of_thousands_of_children_is_found_and_none_leaks() -> None:
    index = PrefixIndex()
    contents = {block: encode([block // 100, block // 10 % 10, block % 10]) for block in range(1, 5000)}
    for block, content in contents.items():
        index.begin(block)
        index.add(block, ROOT, content)
    index.begin(5000)
    assert index.longest(ROOT, encode([37, 4, 2, 1]))[0] == Hit(3742, 3)
    assert index.longest(ROOT, encode([37, 4, 77]))[0].num_tokens == 2
    assert index.longest(ROOT, encode([99]))[0] == Hit()
    for block in contents:
        index.discard(block)
    assert len(index) == 0
    assert index.longest(ROOT, encode([37, 4, 2])) == (Hit(), Hit())
    index.check()
