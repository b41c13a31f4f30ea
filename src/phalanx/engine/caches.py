"""What a request holds in the KV cache: all that the scheduler has to do with blocks goes through here."""

from __future__ import annotations

from phalanx.engine.blocks import BlockPool, Parent
from phalanx.engine.request import Refusal, Request


class Caches:
    """Takes blocks for requests, cached ones first, offers full ones to the prefix cache, and gives them back."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._taken = 0

    def take(self, request: Request, kept_free: int) -> bool:
        """Blocks for all tokens of a waiting request, or none if that would leave fewer than `kept_free`.

        The last token is always computed anew.
        """
        if self._is_refused_still(request, kept_free):
            return False
        cached, parent = self._match(request)
        fresh = self.pool.blocks_for(len(request.tokens)) - len(cached)
        needed = fresh + sum(map(self.pool.is_idle, cached))
        if needed + kept_free > self.pool.available:
            behind = self._block_of(request, len(cached), before=len(request.tokens) - 1)
            request.refusal = Refusal(needed, parent, behind, self._taken)
            return False
        self._taken += 1
        self.pool.hold(cached)
        request.refusal = request.found = None
        request.computed = len(cached) * self.pool.block_size
        request.registered_blocks, request.cache_parent = len(cached), parent
        self._give(request, cached + self.pool.allocate(fresh))
        return True

    def grow(self, request: Request) -> list[int]:
        """One block more. The caller has checked `pool.available`."""
        added = self.pool.allocate(1)
        self._give(request, added)
        return added

    def found(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache held when this was first asked."""
        if request.found is None:
            request.found = len(self._match(request)[0]) * self.pool.block_size
        return request.found

    def register(self, request: Request) -> None:
        """Offer blocks that are full of known tokens to the prefix cache."""
        if self.pool.cache is None:
            return
        full = min(request.computed, len(request.tokens)) // self.pool.block_size
        for index in range(request.registered_blocks, full):
            tokens = self._block_of(request, index, before=full * self.pool.block_size)
            request.cache_parent = self.pool.cache.insert(request.cache_parent, tokens, request.blocks[index])
            request.registered_blocks = index + 1

    def forget_from(self, request: Request, position: int) -> None:
        """No prefix is to be found in blocks that were filled from this position on."""
        if self.pool.cache is not None:
            for block in request.blocks[position // self.pool.block_size :]:
                if block in self.pool.cache:
                    self.pool.cache.forget(block)

    def release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.room = request.computed = request.registered_blocks = 0
        request.cache_parent = request.salt

    def _give(self, request: Request, blocks: list[int]) -> None:
        request.blocks += blocks
        request.room = min(len(request.blocks) * self.pool.block_size, request.longest - 1)

    def _match(self, request: Request) -> tuple[list[int], Parent]:
        if self.pool.cache is None:
            return [], request.salt
        return self.pool.cache.match(request.tokens[:-1], request.salt)

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
