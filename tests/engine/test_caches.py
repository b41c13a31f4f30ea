"""What a waiting request finds in the prefix cache, and how often it has to look."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.engine.blocks import BlockPool, PrefixCache
from phalanx.engine.caches import Caches
from phalanx.engine.core import Engine
from phalanx.engine.request import Phase, Request

from .books import check_answer, greedy, make_engine, run

TEXT = [1 + index % 6 for index in range(60)]


class Looks:
    """Counts the times that prompts of a length are looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
        self.count = 0
        match = PrefixCache.match

        def counted(cache: PrefixCache, tokens: Sequence[int], salt: str | None) -> tuple[list[int], list[int]]:
            self.count += len(tokens) == length - 1
            return match(cache, tokens, salt)

        monkeypatch.setattr(PrefixCache, "match", counted)


def blocked(length: int = 32) -> tuple[Engine, Request, Request]:
    """A request runs, and the next one, most of whose prompt is in the cache, does not fit beside it."""
    engine, _ = make_engine(block_size=4, num_blocks=16, max_model_len=64, budget=64)
    engine.add(TEXT[:length], greedy(1))
    run(engine)
    running = engine.add([6] * 36, greedy(20))
    engine.step()
    head = engine.add(TEXT[:length], greedy(2))
    return engine, running, head


@pytest.mark.parametrize("length", [32, 33, 35])
def test_a_blocked_head_is_looked_up_once_while_it_cannot_fit(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, running, head = blocked(length)
    looks = Looks(monkeypatch, length)
    while running.phase is Phase.RUNNING:
        assert head.phase is Phase.WAITING
        engine.step()
    assert looks.count == 1, "blocks were taken and others became full meanwhile"
    run(engine)
    assert looks.count == 2
    check_answer(head, 64)


def test_it_is_looked_up_again_when_enough_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, running, head = blocked()
    looks = Looks(monkeypatch, 32)
    engine.step()
    engine.cancel(running.id)
    engine.step()
    assert head.phase is Phase.RUNNING
    assert looks.count == 2


def test_it_is_looked_up_again_when_more_of_its_prefix_is_there() -> None:
    """Another request computes the same text: what it holds, the second one need not find room for."""
    caches = Caches(BlockPool(num_blocks=8, block_size=4))
    first, second = (Request(length, TEXT[:length], greedy(1), 0, None) for length in (16, 20))
    assert caches.take(first, kept_free=0, most=64)
    for computed, fits in ((8, False), (8, False), (11, False), (12, True)):
        first.computed = computed
        caches.register(first)
        assert caches.take(second, kept_free=2, most=64) is fits, f"{computed} tokens of it are computed"
    assert second.blocks[:3] == first.blocks[:3]
    assert second.computed == 12


def test_it_is_looked_up_again_when_someone_else_was_given_blocks() -> None:
    """A third request takes hold of idle blocks of the same prefix: fewer are available, but fewer are needed too."""
    caches = Caches(BlockPool(num_blocks=8, block_size=4))
    done, other, head = (Request(length, TEXT[:length], greedy(1), 0, None) for length in (16, 17, 21))
    assert caches.take(done, kept_free=0, most=64)
    done.computed = 16
    caches.register(done)
    caches.release(done)
    assert not caches.take(head, kept_free=3, most=64), "six of eight"
    assert caches.take(other, kept_free=0, most=64)
    assert caches.pool.available == 3
    assert caches.take(head, kept_free=1, most=64), "it needs two where it needed six"


def test_who_fits_at_once_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    looks = Looks(monkeypatch, 20)
    engine.add(TEXT[:20], greedy(4))
    run(engine)
    assert looks.count == 1
