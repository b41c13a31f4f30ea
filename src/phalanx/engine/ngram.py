"""Drafts without a model: what followed the last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from phalanx.engine.request import Request

SHORTEST = 3
"""Tokens that have to agree before what followed them is worth a try."""
LOOKS = 8
"""Places where they stood that are looked at for the longest agreement."""
LONGEST = 64
"""An agreement that is longer than this is as good as any."""
MOST_INDEXED = 32_768
"""Of a sequence, the last tokens that are searched."""
AT_ONCE = 4_096
"""Tokens that are taken in before one step: a long prompt is searched a few steps later."""


class Index:
    """Where each run of `SHORTEST` tokens of a sequence ends, the latest place first."""

    def __init__(self, start: int) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, int] = {}
        self._upto = start + SHORTEST

    def take_in(self, tokens: Sequence[int]) -> bool:
        """All runs that end before the last token, or some of them. Whether none is left."""
        stop = min(len(tokens), self._upto + AT_ONCE)
        for end in range(self._upto, stop):
            run = tuple(tokens[end - SHORTEST : end])
            if run in self._latest:
                self._earlier[end] = self._latest[run]
            self._latest[run] = end
        self._upto = max(self._upto, stop)
        return stop == len(tokens) or self._upto >= len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Behind which place the tokens before agree with the last ones for longest."""
        places = islice(self._places(tuple(tokens[-SHORTEST:])), LOOKS)
        return max(places, key=lambda end: _agreement(tokens, end), default=None)

    def _places(self, run: tuple[int, ...]) -> Sequence[int]:
        found: list[int] = []
        end = self._latest.get(run)
        while end is not None and len(found) < LOOKS:
            found.append(end)
            end = self._earlier.get(end)
        return found


def _agreement(tokens: Sequence[int], end: int) -> int:
    """How many tokens before `end` are also the last ones."""
    last, length = len(tokens), SHORTEST
    while length < min(end, LONGEST) and tokens[end - length - 1] == tokens[last - length - 1]:
        length += 1
    return length


class NgramDrafter:
    """Searches prompt and answer of each request."""

    def __init__(self) -> None:
        self._indices: dict[int, Index] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        """What may follow the tokens that are known of a request."""
        tokens = request.tokens
        index = self._indices.get(request.id)
        if index is None:
            index = self._indices[request.id] = Index(max(0, request.prompt_length - MOST_INDEXED))
        end = index.find(tokens) if index.take_in(tokens) and len(tokens) >= SHORTEST else None
        if end is None:
            return []
        drafts = tokens[end : end + most]
        while len(drafts) < most:
            drafts.append(drafts[len(drafts) - (len(tokens) - end)])
        return drafts

    def may_follow(self, request: Request) -> bool:
        """Whether the token on its way may be the first of some that come true."""
        return len(self.propose(request, 2)) > 1

    def forget(self, request: Request) -> None:
        self._indices.pop(request.id, None)
