"""The roster: which requests wait, which run, and what those that run have to compute."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from phalanx.engine.caches import Caches
from phalanx.engine.request import Phase, Request

KEPT_FREE = 0.02
"""The least share of all blocks that admissions leave to running requests to grow into."""

_order = attrgetter("order")


def kept_free(num_blocks: int, running: int, again: bool) -> int:
    """Blocks of a group that an admission leaves to those that run: for every second one a block to grow into.

    A request that has been preempted leaves one to each, itself included. So it does not come back into the shortage
    that it fell victim to: for as long as a block lasts, nobody needs to take what it holds.
    """
    return max(int(KEPT_FREE * num_blocks), running + 1 if again else running // 2)


class Roster:
    """All requests that have not ended, in order of priority and arrival, and how many each owner has.

    A request that runs is a prompt (more than one token to compute), or ready (exactly one), or can only be read: all
    its tokens are launched, or, under a grammar, the next one depends on one not yet read.
    """

    def __init__(self, caches: Caches, slots: int) -> None:
        self.caches = caches
        self.pool = caches.pool
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ready: dict[int, Request] = {}
        self.prompts: dict[int, Request] = {}
        self.free_slots = list(range(slots))
        self.owners: Counter[str] = Counter()
        self.preemptions = 0

    def kept_free(self, request: Request) -> int:
        """Blocks of each group that are not for this request, since others run that may need them."""
        if not self.running:
            return 0
        return kept_free(self.caches.blocks_of_group, len(self.running), again=request.preemptions > 0)

    def _wait(self, request: Request) -> None:
        self.requests[request.id] = request
        self.owners[request.owner] += 1
        insort(self.waiting, request, key=_order)

    def _enter_batch(self, request: Request) -> int:
        """Its slot."""
        _remove(self.waiting, request)
        insort(self.running, request, key=_order)
        request.phase = Phase.RUNNING
        request.slot = slot = heapq.heappop(self.free_slots)
        return slot

    def preempt(self, request: Request) -> None:
        """It gives up its slot and its blocks, and waits to be computed again."""
        self._leave_batch(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=_order)

    def _strike(self, request: Request) -> None:
        """It has ended."""
        if request.phase is Phase.RUNNING:
            self._leave_batch(request)
        else:
            _remove(self.waiting, request)
        request.phase = Phase.FINISHED
        del self.requests[request.id]
        self.owners[request.owner] -= 1
        if not self.owners[request.owner]:
            del self.owners[request.owner]

    def _leave_batch(self, request: Request) -> None:
        _remove(self.running, request)
        self.ready.pop(request.id, None)
        self.prompts.pop(request.id, None)
        self.caches.release(request)
        assert request.slot is not None
        heapq.heappush(self.free_slots, request.slot)
        request.slot = None
        request.untold = request.rewound = False


def _remove(ordered: list[Request], request: Request) -> None:
    del ordered[bisect_left(ordered, request.order, key=_order)]
