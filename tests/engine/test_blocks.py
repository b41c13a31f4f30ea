"""Blocks: counted, given out in order, and shared only between equal prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.blocks import BlockPool, Parent, PrefixCache
from phalanx.errors import ConfigError


class SameHash(int):
    """A token whose hash says nothing: every prefix of the same length collides."""

    def __hash__(self) -> int:
        return 1


def remember(cache: PrefixCache, tokens: Sequence[int], blocks: Sequence[int], salt: str | None = None) -> None:
    """Enter a sequence block by block, as a request does while it is computed."""
    parent: Parent = salt
    for index, block in enumerate(blocks):
        parent = cache.insert(parent, tokens[index * cache.block_size : (index + 1) * cache.block_size], block)


def cached_pool(num_blocks: int, tokens: Sequence[int], block_size: int = 2) -> tuple[BlockPool, list[int]]:
    """A pool in which one sequence was computed and then released."""
    pool = BlockPool(num_blocks, block_size)
    assert pool.cache is not None
    blocks = pool.allocate(len(tokens) // block_size)
    remember(pool.cache, tokens, blocks)
    pool.release(blocks)
    return pool, blocks


def test_match_finds_the_longest_cached_prefix() -> None:
    cache = PrefixCache(2)
    remember(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert cache.match([1, 2, 3, 4, 5, 6, 7], None)[0] == [10, 11, 12]
    assert cache.match([1, 2, 3, 4, 9, 9], None)[0] == [10, 11]
    assert cache.match([9, 2, 3, 4], None) == ([], [])
    assert cache.match([], None) == ([], [])


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_whole_blocks_match(length: int, blocks: int) -> None:
    cache = PrefixCache(4)
    remember(cache, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    assert len(cache.match([1, 2, 3, 4, 5, 6, 7, 8][:length], None)[0]) == blocks


def test_equal_tokens_after_different_prefixes_are_different_blocks() -> None:
    cache = PrefixCache(2)
    remember(cache, [1, 1, 5, 5], [0, 1])
    remember(cache, [2, 2, 5, 5], [2, 3])
    assert cache.match([1, 1, 5, 5], None)[0] == [0, 1]
    assert cache.match([2, 2, 5, 5], None)[0] == [2, 3]
    assert cache.match([5, 5], None)[0] == []


def test_the_matched_node_is_where_the_next_block_is_entered() -> None:
    cache = PrefixCache(2)
    remember(cache, [1, 2], [0])
    _, nodes = cache.match([1, 2, 3], None)
    cache.insert(nodes[-1], [3, 4], 1)
    assert cache.match([1, 2, 3, 4], None)[0] == [0, 1]


def test_prefixes_that_only_share_a_hash_do_not_share_blocks() -> None:
    one, two = [SameHash(token) for token in (1, 2, 3, 4)], [SameHash(token) for token in (1, 2, 5, 6)]
    other = [SameHash(token) for token in (7, 8, 3, 4)]
    assert hash(tuple(one)) == hash(tuple(two)) == hash(tuple(other))
    cache = PrefixCache(2)
    remember(cache, one, [0, 1])
    assert cache.match(two, None)[0] == [0]
    assert cache.match(other, None)[0] == []
    remember(cache, other, [2, 3])
    assert cache.match(one, None)[0] == [0, 1]
    assert cache.match(other, None)[0] == [2, 3]


def test_salts_live_in_different_trees() -> None:
    cache = PrefixCache(2)
    remember(cache, [1, 2, 3, 4], [0, 1], salt="a")
    assert cache.match([1, 2, 3, 4], "a")[0] == [0, 1]
    assert cache.match([1, 2, 3, 4], "b")[0] == []
    assert cache.match([1, 2, 3, 4], None)[0] == []
    remember(cache, [1, 2, 3, 4], [2, 3])
    assert cache.match([1, 2, 3, 4], None)[0] == [2, 3]


def test_a_salt_that_looks_like_a_node_is_still_a_salt() -> None:
    cache = PrefixCache(2)
    node = cache.insert(None, [1, 2], 0)
    cache.insert(node, [3, 4], 1)
    assert cache.match([3, 4], str(node))[0] == []


def test_a_duplicate_keeps_the_first_block_and_gives_the_same_node() -> None:
    cache = PrefixCache(2)
    assert cache.insert(None, [1, 2], 0) == cache.insert(None, [1, 2], 5)
    assert cache.match([1, 2], None)[0] == [0]
    assert 5 not in cache
    assert len(cache) == 1


def test_a_forgotten_prefix_is_not_found_nor_what_came_after_it() -> None:
    cache = PrefixCache(2)
    remember(cache, [1, 2, 3, 4], [0, 1])
    cache.forget(0)
    assert cache.match([1, 2, 3, 4], None)[0] == []
    remember(cache, [1, 2], [7])
    assert cache.match([1, 2, 3, 4], None)[0] == [7], "block 1 belongs to a tree that is gone"


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), min_size=1, max_size=6),
    query=st.lists(st.integers(0, 1), max_size=8),
    same_hash=st.booleans(),
)
def test_match_is_the_longest_prefix_of_whole_blocks_ever_entered(
    texts: list[list[int]], query: list[int], same_hash: bool
) -> None:
    token = SameHash if same_hash else int
    cache, block = PrefixCache(2), 0
    known: dict[tuple[int, ...], int] = {}
    for text in texts:
        blocks = list(range(block, block + len(text) // 2))
        block += len(blocks)
        remember(cache, [token(value) for value in text], blocks)
        for index, number in enumerate(blocks):
            known.setdefault(tuple(text[: 2 * index + 2]), number)
    expected: list[int] = []
    while (prefix := tuple(query[: 2 * len(expected) + 2])) in known and len(expected) < len(query) // 2:
        expected.append(known[prefix])
    assert cache.match([token(value) for value in query], None)[0] == expected


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (8, 0)])
def test_a_pool_without_blocks_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError) as error:
        BlockPool(num_blocks, block_size)
    assert error.value.code == "no_blocks"
    assert f"{num_blocks} KV blocks of {block_size} tokens" in error.value.found


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(tokens) == blocks


def test_a_block_is_given_out_once_until_it_is_released() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2), pool.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.available == 0
    pool.release(first)
    assert pool.available == 2
    assert sorted(pool.allocate(2)) == sorted(first)


def test_a_shared_block_is_available_after_its_last_holder() -> None:
    pool, blocks = cached_pool(2, [1, 2])
    pool.hold(blocks)
    pool.hold(blocks)
    assert pool.available == 1
    pool.release(blocks)
    assert pool.available == 1
    pool.release(blocks)
    assert pool.available == 2


def test_releasing_more_often_than_held_is_an_error() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} released more often than held"):
        pool.release(blocks)
    assert pool.available == 2


def test_without_prefix_caching_nothing_is_remembered() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    pool.release(pool.allocate(2))
    assert pool.cache is None
    assert not any(pool.is_idle(block) for block in range(2))
    assert pool.available == 2


def test_a_released_cached_block_is_idle_and_can_be_held_again() -> None:
    pool, blocks = cached_pool(4, [1, 2, 3, 4])
    assert pool.cache is not None
    assert [pool.is_idle(block) for block in blocks] == [True, True]
    assert pool.idle == 2
    assert pool.available == 4
    pool.hold(pool.cache.match([1, 2, 3, 4], None)[0])
    assert pool.available == 2
    assert not set(pool.allocate(2)) & set(blocks)


def test_free_blocks_go_before_cached_ones() -> None:
    pool, blocks = cached_pool(4, [1, 2, 3, 4])
    assert not set(pool.allocate(2)) & set(blocks)
    assert pool.cache is not None
    assert pool.cache.match([1, 2, 3, 4], None)[0] == blocks


def test_the_head_of_a_sequence_outlives_its_tail() -> None:
    pool, blocks = cached_pool(3, [1, 2, 3, 4, 5, 6])
    assert pool.cache is not None
    for left in (2, 1, 0):
        assert pool.allocate(1) == [blocks[left]]
        assert pool.cache.match([1, 2, 3, 4, 5, 6], None)[0] == blocks[:left]


def test_the_least_recently_used_sequence_goes_first() -> None:
    pool = BlockPool(3, 2)
    assert pool.cache is not None
    blocks = pool.allocate(3)
    for token, block in enumerate(blocks):
        pool.cache.insert(None, [token, token], block)
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    pool.release([blocks[2]])
    pool.hold([blocks[0]])
    pool.release([blocks[0]])
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_a_reset_forgets_what_nobody_uses_and_nothing_else() -> None:
    pool = BlockPool(4, 2)
    assert pool.cache is not None
    used, unused = pool.allocate(1), pool.allocate(1)
    pool.cache.insert(None, [1, 2], used[0])
    pool.cache.insert(None, [3, 4], unused[0])
    pool.release(unused)
    pool.forget_idle()
    assert (pool.idle, pool.available) == (0, 3)
    assert pool.cache.match([3, 4], None) == ([], [])
    assert pool.cache.match([1, 2], None)[0] == used
    pool.release(used)
    assert (pool.idle, pool.available) == (1, 4)
