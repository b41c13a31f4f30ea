"""What a request holds of the caches: all that the scheduler has to do with blocks and states goes through here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.engine.blocks import BlockPool
from phalanx.engine.request import Need, NoRoom, Request
from phalanx.engine.snapshots import Snapshots

TRIMMED = -1
"""Stands for a block of a window that is out of reach."""


@dataclass(frozen=True)
class CacheLayout:
    """What layers keep of a sequence beside blocks for all of its tokens.

    Each of `windows` is the reach of a group of layers that has blocks of its own. `states`: there are layers with a
    state of fixed size; `snapshots` are the places for copies of theirs, and `twins`, one a slot, those for states as
    they were before drafts. Where every layer has a window, only token ids are kept of whole sequences: these have
    `token_blocks` of their own.
    """

    windows: tuple[int, ...] = ()
    states: bool = False
    snapshots: range = range(0)
    twins: range = range(0)
    token_blocks: int = 0

    @property
    def groups(self) -> int:
        return 1 + len(self.windows)

    def need(self, blocks: int, block_size: int) -> Need:
        """The most that a sequence of so many blocks holds at a time, if it is computed token by token."""
        in_reach = (1 + -(-(reach - 1) // block_size) for reach in self.windows)
        return Need(blocks, sum(min(blocks, each) for each in in_reach))

    def fits(self, need: Need, available: int, available_whole: int) -> bool:
        """Among so many blocks; where all groups have the same ones, both numbers are theirs."""
        if self.token_blocks:
            return need.whole <= available_whole and need.windows <= available
        return need.whole + need.windows <= available

    def longest(self, num_blocks: int, block_size: int) -> int:
        """Tokens that a sequence can have which is alone with so many blocks."""

        def is_too_long(blocks: int) -> bool:
            return not self.fits(self.need(blocks, block_size), num_blocks, self.token_blocks)

        most = self.token_blocks or num_blocks
        return bisect_left(range(1, most + 1), x=True, key=is_too_long) * block_size


class Match(NamedTuple):
    """A cached prefix that all layers can resume behind: its blocks, its nodes, and those of each window in reach.

    `known` counts the blocks of the longest one, though some layers may not be able to resume there.
    """

    blocks: list[int]
    nodes: list[int]
    windows: list[list[int]]
    known: int

    @property
    def in_windows(self) -> list[int]:
        return [block for window in self.windows for block in window if block != TRIMMED]


class Caches:
    """Takes blocks for requests, cached ones first, offers full ones to the prefix cache, and gives them back.

    `whole` has the blocks of those that keep all tokens: the same ones as windows have, or, where these are the only
    layers, blocks for token ids.
    """

    def __init__(self, pool: BlockPool, layout: CacheLayout | None = None) -> None:
        self.pool = pool
        self.layout = layout or CacheLayout()
        self.whole = pool.beside(self.layout.token_blocks) if self.layout.token_blocks else pool
        self.snapshots = Snapshots(self.layout.snapshots)
        self._taken = 0

    @property
    def takes_snapshots(self) -> bool:
        return self.layout.states and self.pool.cache is not None

    @property
    def blocks_of_group(self) -> int:
        """Where they are shared out evenly."""
        return self.pool.num_blocks // (self.layout.groups - bool(self.layout.token_blocks))

    def need_of(self, tokens: int) -> Need:
        """The most that a sequence has to hold at a time."""
        return self.layout.need(self.pool.blocks_for(tokens), self.pool.block_size)

    def has(self, need: Need, kept_free: int = 0) -> bool:
        """Whether there are so many blocks, and `kept_free` more for each group."""
        with_rest = Need(need.whole + kept_free, need.windows + len(self.layout.windows) * kept_free)
        return self.layout.fits(with_rest, self.pool.available, self.whole.available)

    def take(self, request: Request, kept_free: int, most: int) -> bool:
        """Blocks for all tokens of a waiting request, in windows for the first `most` that it computes, or none if that
        would leave fewer than `kept_free` of a group.

        The last token is always computed anew.
        """
        if self._is_refused_still(request, kept_free, most):
            return False
        match = self._match(request)
        cached, parent = len(match.blocks), match.nodes[-1] if match.nodes else request.root
        fresh = self.pool.blocks_for(len(request.tokens)) - cached
        first = min(fresh, self.pool.blocks_for(most))
        needed = Need(
            fresh + sum(map(self.whole.is_idle, match.blocks)),
            first * len(match.windows) + sum(map(self.pool.is_idle, match.in_windows)),
        )
        if not self.has(needed, kept_free):
            behind = self._block_of(request, cached, before=len(request.tokens) - 1)
            request.refusal = NoRoom(needed, most, parent, behind, self._taken)
            return False
        self._taken += 1
        self.whole.hold(match.blocks)
        self.pool.hold(match.in_windows)
        request.refusal = request.found = None
        request.computed = cached * self.pool.block_size
        request.registered_blocks, request.cache_parent = cached, parent
        request.blocks = match.blocks + self.whole.allocate(fresh)
        request.windows = [window + self.pool.allocate(first) for window in match.windows]
        self._make_room_known(request)
        if self.takes_snapshots:
            request.restored = self.snapshots.use(match.nodes[-1]) if match.nodes else None
            ends = {match.known, (len(request.tokens) - 1) // self.pool.block_size}
            request.snapshot_ends = sorted(end * self.pool.block_size for end in ends if end > cached)
        return True

    def lacking(self, requests: Iterable[Request]) -> Need:
        """What these need to have a place for another token: a prompt has some already, but for its windows."""
        each = list(requests)
        return Need(sum(map(_is_level, each)), len(each) * len(self.layout.windows))

    def grow(self, request: Request) -> list[list[int]]:
        """One block more for every group that lacks it. The caller has checked that there are some."""
        whole = self.whole.allocate(1) if _is_level(request) else []
        request.blocks += whole
        return [whole, *self._widen(request, 1)]

    def extend(self, prompt: Request, count: int) -> list[list[int]]:
        """Blocks in windows for the next `count` tokens of a prompt, or as many as there are."""
        missing = self.pool.blocks_for(prompt.computed + count) - len(prompt.windows[0])
        return [[], *self._widen(prompt, min(missing, self.pool.available // len(prompt.windows)))]

    def _widen(self, request: Request, count: int) -> list[list[int]]:
        added = [self.pool.allocate(count) for _ in request.windows]
        for window, blocks in zip(request.windows, added, strict=True):
            window += blocks
        self._make_room_known(request)
        return added

    def trim(self, request: Request) -> None:
        """Give up blocks of windows that no token to come looks back on."""
        for reach, window in zip(self.layout.windows, request.windows, strict=True):
            end = max(0, request.computed - reach + 1) // self.pool.block_size
            first = end
            while first and window[first - 1] != TRIMMED:
                first -= 1
            self.pool.release(window[first:end])
            window[first:end] = [TRIMMED] * (end - first)

    def found(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache held when this was first asked."""
        if request.found is None:
            request.found = len(self._match(request).blocks) * self.pool.block_size
        return request.found

    def register(self, request: Request) -> None:
        """Offer blocks that are full of known tokens to the prefix cache."""
        if self.pool.cache is None:
            return
        full = min(request.computed, len(request.tokens)) // self.pool.block_size
        for index in range(request.registered_blocks, full):
            tokens = self._block_of(request, index, before=full * self.pool.block_size)
            node = self.pool.cache.insert(request.cache_parent, tokens, request.blocks[index])
            for group, window in enumerate(request.windows):
                if window[index] != TRIMMED:
                    self.pool.cache.insert_window(node, group, window[index])
            request.cache_parent, request.registered_blocks = node, index + 1
            if request.saved is not None and request.saved[0] == (index + 1) * self.pool.block_size:
                self._keep_saved(request, node)

    def save(self, request: Request) -> int | None:
        """Reserve a place for a copy of the state that this step leaves, where the prefix so far is whole blocks.

        While it decodes, a request has one such copy, which moves along with it.
        """
        if request.computed % self.pool.block_size or request.saved is not None:
            return None
        place = self.snapshots.reserve()
        if place is not None:
            request.saved = (request.computed, place)
        return place

    def settle(self, prompt: Request) -> None:
        """The step that computes a part of this prompt is planned: for the next one, what it leaves is there, and what
        only it looked back on is not needed any more.
        """
        known = prompt.registered_blocks * self.pool.block_size
        if prompt.saved is not None and prompt.saved[0] == known:
            assert isinstance(prompt.cache_parent, int)
            self._keep_saved(prompt, prompt.cache_parent)
        self.trim(prompt)

    def _keep_saved(self, request: Request, node: int) -> None:
        assert request.saved is not None
        position, place = request.saved
        self.snapshots.keep(node, place)
        request.saved = None
        if request.moving_node is not None:
            self.snapshots.drop(request.moving_node)
        request.moving_node = node if position > request.prompt_length else None

    def forget_from(self, request: Request, position: int) -> None:
        """No prefix is to be found in blocks that were filled from this position on."""
        if self.pool.cache is not None:
            for block in request.blocks[position // self.pool.block_size :]:
                if block in self.pool.cache:
                    self.pool.cache.forget(block)

    def release(self, request: Request) -> None:
        for window in request.windows:
            self.pool.release([block for block in window if block != TRIMMED])
        self.whole.release(request.blocks)
        if request.saved is not None:
            self.snapshots.give_up(request.saved[1])
        request.blocks, request.windows, request.snapshot_ends = [], [], []
        request.room = request.computed = request.registered_blocks = 0
        request.cache_parent = request.root
        request.saved = request.restored = request.moving_node = None

    def _make_room_known(self, request: Request) -> None:
        blocks = min(map(len, (request.blocks, *request.windows)))
        request.room = min(blocks * self.pool.block_size, request.longest - 1)

    def _match(self, request: Request) -> Match:
        cache = self.pool.cache
        if cache is None:
            return Match([], [], [[] for _ in self.layout.windows], 0)
        blocks, nodes = cache.match(request.tokens[: request.resumable], request.root)
        end = self._resumable(nodes)
        windows = [
            [TRIMMED] * start + [block for node in nodes[start:end] if (block := cache.window(node, group)) is not None]
            for group, start in enumerate(self._starts(end))
        ]
        return Match(blocks[:end], nodes[:end], windows, len(nodes))

    def _starts(self, end: int) -> list[int]:
        """The first block of each window that is in reach of the token behind so many blocks."""
        size = self.pool.block_size
        return [max(0, end * size - reach + 1) // size for reach in self.layout.windows]

    def _resumable(self, nodes: Sequence[int]) -> int:
        """The most blocks behind which all layers have what they look back on."""
        if not self.layout.windows and not self.layout.states:
            return len(nodes)
        cache = self.pool.cache
        assert cache is not None
        best, since = 0, [0] * len(self.layout.windows)
        for end, node in enumerate(nodes, start=1):
            for group in range(len(since)):
                if cache.window(node, group) is None:
                    since[group] = end
            in_reach = all(whole <= start for whole, start in zip(since, self._starts(end), strict=True))
            if in_reach and (not self.layout.states or node in self.snapshots):
                best = end
        return best

    def _block_of(self, request: Request, index: int, before: int) -> tuple[int, ...]:
        """The tokens of a block, as far as they lie before a position."""
        start = index * self.pool.block_size
        return tuple(request.tokens[start : min(start + self.pool.block_size, before)])

    def _is_refused_still(self, request: Request, kept_free: int, most: int) -> bool:
        """Whether a second look would find as little room as the first, which costs more the longer the prefix is.

        What others take, give up or lose to eviction of the prefix that was found changes what is needed and what is
        available alike. So there is room once enough is available, or another request has computed more of the prefix.
        """
        refusal = request.refusal
        if refusal is None or refusal.taken != self._taken:
            return False
        if self.has(refusal.needed, kept_free) or (self.layout.windows and most < refusal.most):
            return False
        return self.pool.cache is None or not self.pool.cache.knows(refusal.parent, refusal.next_block)


def _is_level(request: Request) -> bool:
    """Whether it has as many blocks of every group, those given up included."""
    return all(len(window) == len(request.blocks) for window in request.windows)
