"""Masks travel once, packed, and a step's own masks never make way for each other."""

from __future__ import annotations

import random

import msgspec

from phalanx.engine.masks import MaskBook, places_for, unpack

from .books import ToyMatcher, greedy, make_engine, run


def a_mask(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_mask_travels_when_it_is_first_used_and_later_goes_by_its_place() -> None:
    book = MaskBook(4)
    places = [book.place(a_mask(number)) for number in (7, 8, 7)]
    assert places[0] == places[2] != places[1]
    assert [(place, unpack(packed)) for place, packed in book.take_new()] == [
        (places[0], a_mask(7)),
        (places[1], a_mask(8)),
    ]
    assert book.place(a_mask(8)) == places[1]
    assert book.take_new() == []


def test_the_mask_used_longest_ago_makes_way() -> None:
    book = MaskBook(2)
    first, second = book.place(a_mask(1)), book.place(a_mask(2))
    book.place(a_mask(1))
    assert book.place(a_mask(3)) == second
    assert book.place(a_mask(1)) == first
    assert [place for place, _ in book.take_new()] == [first, second, second]


def test_who_takes_in_what_is_new_finds_every_mask_in_its_place() -> None:
    rng, seats = random.Random(2), 3
    book = MaskBook(places_for(seats))
    kept: dict[int, bytes] = {}
    for _ in range(300):
        masks = [a_mask(rng.randrange(9)) for _ in range(seats)]
        places = [book.place(mask) for mask in masks]
        kept |= {place: unpack(packed) for place, packed in book.take_new()}
        assert [kept[place] for place in places] == masks
        assert max(kept) < places_for(seats)


def test_a_mask_that_allows_little_or_nearly_all_is_small_on_its_way() -> None:
    vocab = 152_064
    for mask in (1 << 5000, (1 << vocab) - 1 - (1 << 5000)):
        book = MaskBook(1)
        book.place(mask.to_bytes(vocab // 8, "little"))
        ((_, packed),) = book.take_new()
        assert len(packed) < 200 < vocab // 8


def test_an_answer_under_a_grammar_sends_each_mask_of_it_once() -> None:
    engine, runner = make_engine()
    engine.add([1, 2, 3], greedy(None), matcher=ToyMatcher(30))
    run(engine)
    packed = [mask for plan in runner.plans for _, mask in plan.new_masks]
    assert sum(len(plan.masks) for plan in runner.plans) == 30
    assert len(packed) == len(set(packed)) == 3, "the toy has three states"
    assert len(msgspec.msgpack.encode(runner.plans[-1])) < 40
