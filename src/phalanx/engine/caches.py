"""What a request holds of the caches: all that the scheduler has to do with blocks and states goes through here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.engine.blocks import BlockPool
from phalanx.engine.request import NoRoom, Request
from phalanx.engine.snapshots import Snapshots

TRIMMED = -1
"""Stands for a block of a window that is out of reach."""


@dataclass(frozen=True)
class CacheLayout:
    """What layers keep of a sequence beside blocks for all of its tokens.

    Each of `windows` is the reach of a group of layers that has blocks of its own. `states`: there are layers with a
    state of fixed size; `snapshots` are the places for copies of theirs, and `twins`, one a slot, those for states as
    they were before drafts.
    """

    windows: tuple[int, ...] = ()
    states: bool = False
    snapshots: range = range(0)
    twins: range = range(0)

    @property
    def groups(self) -> int:
        return 1 + len(self.windows)


class Match(NamedTuple):
    """A cached prefix that all layers can resume behind: its blocks, its nodes, and those of each window in reach.

    `known` counts the blocks of the longest one, though some layers may not be able to resume there.
    """

    blocks: list[int]
    nodes: list[int]
    windows: list[list[int]]
    known: int

    @property
    def held(self) -> list[int]:
        return [*self.blocks, *(block for window in self.windows for block in window if block != TRIMMED)]


class Caches:
    """Takes blocks for requests, cached ones first, offers full ones to the prefix cache, and gives them back."""

    def __init__(self, pool: BlockPool, layout: CacheLayout | None = None) -> None:
        self.pool = pool
        self.layout = layout or CacheLayout()
        self.snapshots = Snapshots(self.layout.snapshots)
        self._taken = 0

    @property
    def takes_snapshots(self) -> bool:
        return self.layout.states and self.pool.cache is not None

    def blocks_for(self, tokens: int) -> int:
        """Blocks of all groups for a sequence before anything of it is out of reach."""
        return self.layout.groups * self.pool.blocks_for(tokens)

    def take(self, request: Request, kept_free: int) -> bool:
        """Blocks for all tokens of a waiting request, or none if that would leave fewer than `kept_free`.

        The last token is always computed anew.
        """
        if self._is_refused_still(request, kept_free):
            return False
        match = self._match(request)
        cached, parent = len(match.blocks), match.nodes[-1] if match.nodes else request.root
        fresh = self.pool.blocks_for(len(request.tokens)) - cached
        held = match.held
        needed = self.layout.groups * fresh + sum(map(self.pool.is_idle, held))
        if needed + kept_free > self.pool.available:
            behind = self._block_of(request, cached, before=len(request.tokens) - 1)
            request.refusal = NoRoom(needed, parent, behind, self._taken)
            return False
        self._taken += 1
        self.pool.hold(held)
        request.refusal = request.found = None
        request.computed = cached * self.pool.block_size
        request.registered_blocks, request.cache_parent = cached, parent
        request.windows = [window + self.pool.allocate(fresh) for window in match.windows]
        self._give(request, match.blocks + self.pool.allocate(fresh))
        if self.takes_snapshots:
            request.restored = self.snapshots.use(match.nodes[-1]) if match.nodes else None
            ends = {match.known, (len(request.tokens) - 1) // self.pool.block_size}
            request.snapshot_ends = sorted(end * self.pool.block_size for end in ends if end > cached)
        return True

    def grow(self, request: Request) -> list[list[int]]:
        """One block more for every group. The caller has checked `pool.available`."""
        added = [self.pool.allocate(1) for _ in range(self.layout.groups)]
        for window, blocks in zip(request.windows, added[1:], strict=True):
            window += blocks
        self._give(request, added[0])
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
        self.pool.release(request.blocks)
        if request.saved is not None:
            self.snapshots.give_up(request.saved[1])
        request.blocks, request.windows, request.snapshot_ends = [], [], []
        request.room = request.computed = request.registered_blocks = 0
        request.cache_parent = request.root
        request.saved = request.restored = request.moving_node = None

    def _give(self, request: Request, blocks: list[int]) -> None:
        request.blocks += blocks
        request.room = min(len(request.blocks) * self.pool.block_size, request.longest - 1)

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

    def _is_refused_still(self, request: Request, kept_free: int) -> bool:
        """Whether a second look would find as little room as the first, which costs more the longer the prefix is.

        What others take, give up or lose to eviction of the prefix that was found changes what is needed and what is
        available alike. So there is room once enough is available, or another request has computed more of the prefix.
        """
        refusal = request.refusal
        if refusal is None or refusal.taken != self._taken:
            return False
        if refusal.needed + kept_free <= self.pool.available:
            return False
        return self.pool.cache is None or not self.pool.cache.knows(refusal.parent, refusal.next_block)
