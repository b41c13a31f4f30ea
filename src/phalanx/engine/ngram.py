"""Drafts without a model: what followed the last tokens where they stood before."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from phalanx.engine.request import Request

SHORTEST = 3
"""Tokens that have to agree before what followed them is worth a try."""
RESUMED = 5
"""The same before one token that differs: a log's next line has another number in the same place."""
LOOKS = 4
"""Places where they stood that are looked at."""
LONGEST = 48
"""An agreement that is longer than this is as good as any."""
HEARD = 0.25
"""Of the longest agreement, what another place must have to be heard: where they disagree, drafts end."""
MOST_INDEXED = 32_768
"""Of a sequence, the last tokens that are searched."""
FAMILY_TOKENS = 32
"""Prompts that begin with the same so many tokens are of one family."""
FAMILIES, ANSWERS, MOST_REMEMBERED = 64, 4, 2_048
"""Families that are known, answers of each, tokens of an answer: half a million tokens at most."""
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

    def sources(self, tokens: Sequence[int]) -> dict[int, int]:
        """Places where it may go on as it does behind the last token, and how many tokens before they have in common.

        One of these may differ, the last one too.
        """
        found: dict[int, int] = {}
        for skipped, least in ((0, SHORTEST), (1, RESUMED)):
            last = len(tokens) - skipped
            for end in self._places(tuple(tokens[max(0, last - SHORTEST) : last])):
                common = _agreement(tokens, end, last)
                if common >= least and end + skipped < len(tokens):
                    found[end + skipped] = max(common - skipped, found.get(end + skipped, 0))
        return found

    def _places(self, run: tuple[int, ...]) -> Sequence[int]:
        found: list[int] = []
        end = self._latest.get(run)
        while end is not None and len(found) < LOOKS:
            found.append(end)
            end = self._earlier.get(end)
        return found


def _agreement(tokens: Sequence[int], end: int, last: int) -> int:
    """How many tokens before `end` are those before `last`, up to the second one that differs."""
    common, differed = 0, False
    for back in range(1, min(end, LONGEST) + 1):
        if tokens[end - back] == tokens[last - back]:
            common += 1
        elif differed:
            break
        else:
            differed = True
    return common


def _agreed(tokens: Sequence[int], sources: Mapping[int, int], most: int) -> list[int]:
    """What follows at all of these places that have enough in common with the end: half as many tokens as that."""
    longest = max(sources.values(), default=0)
    places = [place for place, common in sources.items() if common >= HEARD * longest]
    known, drafts = len(tokens), list[int]()
    while places and len(drafts) < min(most, max(1, longest // 2)):
        at = len(drafts)
        following = {tokens[place + at] if place + at < known else drafts[place + at - known] for place in places}
        if len(following) > 1:
            break
        drafts.append(following.pop())
    return drafts


class Earlier:
    """The end of a prompt and its answer, and where each run of it ends last."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._ends = {tuple(tokens[end - SHORTEST : end]): end for end in range(SHORTEST, len(tokens))}

    def behind(self, run: tuple[int, ...], most: int) -> list[int]:
        end = self._ends.get(run)
        return [] if end is None else self._tokens[end : end + most]


class NgramDrafter:
    """Searches prompt and answer of each request, then the answers to earlier ones that began alike.

    Who shares no cached prefix, by its salt, shares no answers either. Of so many families the least recently used one
    is forgotten first, of an answer all but its first tokens.
    """

    def __init__(self) -> None:
        self._indices: dict[int, Index] = {}
        self._families: OrderedDict[tuple[object, ...], deque[Earlier]] = OrderedDict()

    def propose(self, request: Request, most: int) -> list[int]:
        """What may follow the tokens that are known of a request."""
        tokens = request.tokens
        index = self._indices.get(request.id)
        if index is None:
            index = self._indices[request.id] = Index(max(0, request.prompt_length - MOST_INDEXED))
        drafts = _agreed(tokens, index.sources(tokens), most) if index.take_in(tokens) else []
        return drafts or self._from_earlier(request, most)

    def may_follow(self, request: Request) -> bool:
        """Whether the token on its way may be the first of some that come true."""
        return len(self.propose(request, 2)) > 1

    def _from_earlier(self, request: Request, most: int) -> list[int]:
        run = tuple(request.tokens[-SHORTEST:])
        answers = self._families.get(_family(request), ())
        return next((found for each in reversed(answers) if (found := each.behind(run, most))), [])

    def forget(self, request: Request) -> None:
        """It has ended: its answer may be of use to others."""
        self._indices.pop(request.id, None)
        start = max(0, request.prompt_length - SHORTEST)
        if len(request.tokens) - start <= SHORTEST:
            return
        family = _family(request)
        answers = self._families.setdefault(family, deque(maxlen=ANSWERS))
        self._families.move_to_end(family)
        answers.append(Earlier(request.tokens[start : start + MOST_REMEMBERED]))
        if len(self._families) > FAMILIES:
            self._families.popitem(last=False)


def _family(request: Request) -> tuple[object, ...]:
    """Whom it shares the beginning of its prompt with."""
    return (request.salt, *request.tokens[: min(FAMILY_TOKENS, request.prompt_length)])
