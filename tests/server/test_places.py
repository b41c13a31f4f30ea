"""Who may wait for the engine where several keys share it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.server.errors import ApiError
from phalanx.server.pace import FreeingPace
from phalanx.server.places import Places


class Supervisor:
    """Of an engine for 64 sequences, with 256 more places to wait."""

    room = 320

    def __init__(self) -> None:
        self.client: Any = SimpleNamespace(pace=FreeingPace())

    def admit(self, choices: int) -> Any:
        return self.client


def places(shared: bool = True) -> Places:
    supervisor: Any = Supervisor()
    return Places(supervisor, shared)


def entered(into: Places, key: str, count: int, choices: int = 1) -> int:
    """How many of so many requests get a place."""
    for number in range(count):
        try:
            into.enter(key, choices)
        except ApiError:
            return number
    return count


def test_with_one_key_all_that_is_admitted_goes_through() -> None:
    assert entered(places(shared=False), "", 320) == 320


@pytest.mark.parametrize(("choices", "most"), [(1, 240), (64, 3), (128, 1), (240, 1), (241, 0)])
def test_a_key_never_has_all_places_however_large_its_requests(choices: int, most: int) -> None:
    house = places()
    assert entered(house, "greedy", 400, choices) == most
    assert entered(house, "honest", 4) == 4


def test_what_could_never_get_a_place_is_told_so() -> None:
    with pytest.raises(ApiError) as refused:
        places().enter("greedy", 241)
    assert (refused.value.status_code, refused.value.body["error"]["code"]) == (400, "too_many_answers")
    assert "at most 240" in refused.value.body["error"]["message"]


def test_who_leaves_leaves_nothing_behind() -> None:
    house = places()
    for place in [house.enter(key, choices) for key in "abc" for choices in (1, 7, 20)]:
        house.leave(place)
    assert not house._queue._held
