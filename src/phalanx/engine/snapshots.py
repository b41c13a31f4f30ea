"""Snapshots of states: where a cached prefix can be resumed by layers that keep more than blocks of its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Snapshots:
    """Places for states beside those of the requests that run, by the node of the prefix behind which they were taken.

    The least recently used one goes first. A prefix that is forgotten keeps its place until then: nobody asks for it.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._free = list(places)
        self._places: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, node: int) -> bool:
        return node in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def places(self) -> list[int]:
        """All that no request holds."""
        return [*self._free, *self._places.values()]

    def use(self, node: int) -> int:
        self._places.move_to_end(node)
        return self._places[node]

    def reserve(self) -> int | None:
        """A place for a state that a step will leave; None where those that run have reserved all."""
        if not self._free and self._places:
            self._free.append(self._places.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def keep(self, node: int, place: int) -> None:
        """Tie a reserved place to its prefix. One that is known already keeps its first."""
        if node in self._places:
            self._free.append(place)
            self._places.move_to_end(node)
        else:
            self._places[node] = place

    def drop(self, node: int) -> None:
        """The state behind this prefix is of no use any more."""
        place = self._places.pop(node, None)
        if place is not None:
            self._free.append(place)

    def give_up(self, place: int) -> None:
        """A reserved place is not needed after all."""
        self._free.append(place)
