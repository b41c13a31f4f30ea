"""Which tokens grammars allow, told to the ranks once: a mask travels when it is new, and later goes by its number."""

from __future__ import annotations

import zlib
from collections import OrderedDict

_FASTEST = 1


def places_for(max_num_seqs: int) -> int:
    """How many masks the ranks keep. A step has one a request at most, so none that it uses has to make way."""
    return 2 * max_num_seqs


class MaskBook:
    """Knows which masks the ranks keep, and where. When all places are taken, the mask used longest ago makes way.

    Grammars come back to the same masks all the time, as within a string, and most of them allow few tokens or forbid
    few: compressed, a hundred bytes instead of the vocabulary's twenty thousand.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._new: list[tuple[int, bytes]] = []

    def place(self, mask: bytes) -> int:
        """Where the ranks find this mask, once they have what `take_new` returns next."""
        place = self._kept.get(mask)
        if place is None:
            full = len(self._kept) == self._places
            place = self._kept.popitem(last=False)[1] if full else len(self._kept)
            self._kept[mask] = place
            self._new.append((place, pack(mask)))
        else:
            self._kept.move_to_end(mask)
        return place

    def take_new(self) -> list[tuple[int, bytes]]:
        """The masks that the ranks do not have yet, packed, and where they are to keep them."""
        new, self._new = self._new, []
        return new

    def forget(self) -> None:
        """The ranks may not have had what they were sent last: all masks travel anew."""
        self._kept.clear()


def pack(mask: bytes) -> bytes:
    return zlib.compress(mask, _FASTEST)


def unpack(packed: bytes) -> bytes:
    return zlib.decompress(packed)
