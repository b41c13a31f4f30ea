"""Places: who may use the engine where several keys share it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from phalanx.server.engine_client import EngineClient
from phalanx.server.errors import bad_request, queue_full
from phalanx.server.fairness import Shares
from phalanx.server.supervisor import Supervisor

_STEPS_OF_PROMPTS = 4


class RequestPlace:
    """One request's share of the engine, until it is left."""

    def __init__(self, engine: EngineClient, key: str, choices: int, tokens: int, priority: int) -> None:
        self.engine = engine
        self.key = key
        self.choices = choices
        self.tokens = tokens
        self.priority = priority
        self.let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Places:
    """Lets requests through to the engine. With one key, all that the supervisor admits.

    With several, no key has all places to wait, nor all sequences of the batch, nor all tokens of prompts that the
    engine has before it; those who wait for these are let in by the priority of their keys, one key after the other.
    """

    def __init__(self, supervisor: Supervisor, shared: bool) -> None:
        self._supervisor = supervisor
        self._shared = shared
        self._queue, self._sequences, self._prompts = (Shares(0, shared) for _ in range(3))
        self._waiting: OrderedDict[str, deque[RequestPlace]] = OrderedDict()

    async def enter(self, key: str, choices: int, tokens: int, priority: int = 0) -> RequestPlace:
        """A place, to be left. ApiError if there is none, or if the server has stopped meanwhile."""
        engine = self._supervisor.admit(choices)
        place = RequestPlace(engine, key, choices, tokens, priority)
        if not self._shared:
            return place
        self._measure(engine)
        self._check_size(choices)
        if not self._queue.take(key, choices):
            held = self._queue.held(key)
            why = f"This key has {held} requests here, and leaves the rest to others."
            raise queue_full(why, engine.pace.seconds_until(choices))
        self._waiting.setdefault(key, deque()).append(place)
        self._let_in()
        try:
            await place.let_in
            place.engine = self._supervisor.admit(0)
        except BaseException:
            self.leave(place)
            raise
        return place

    def prefilled(self, place: RequestPlace) -> None:
        """Its prompts are read."""
        if self._shared and place.tokens:
            self._prompts.give(place.key, self._fitting(self._prompts, place.tokens))
            place.tokens = 0
            self._let_in()

    def leave(self, place: RequestPlace) -> None:
        if not self._shared:
            return
        self._queue.give(place.key, place.choices)
        line = self._waiting.get(place.key)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._waiting[place.key]
            return
        self._sequences.give(place.key, self._fitting(self._sequences, place.choices))
        self.prefilled(place)
        self._let_in()

    def _measure(self, engine: EngineClient) -> None:
        assert engine.started is not None
        config = self._supervisor.launch.config
        self._queue.total = self._supervisor.room
        self._sequences.total = engine.started.max_num_seqs
        self._prompts.total = max(engine.started.max_model_len, _STEPS_OF_PROMPTS * config.max_num_batched_tokens)

    def _check_size(self, choices: int) -> None:
        """A request that filled the batch would keep all other keys from any token until its end."""
        most = max(1, self._sequences.most_at_once)
        if choices > most:
            raise bad_request(
                f"This request asks for {choices} answers at once. Several keys share the {self._sequences.total} that "
                f"this server makes together: ask for at most {most}.",
                "too_many_answers",
                param="n",
            )

    @staticmethod
    def _fitting(shares: Shares, amount: int) -> int:
        """What is larger than all there is counts as all."""
        return min(amount, shares.total)

    def _let_in(self) -> None:
        """The first of each key in turn, those of the best priority first, as long as there is room for one."""
        let_in = True
        while let_in:
            in_turn = sorted(self._waiting, key=lambda key: self._waiting[key][0].priority)
            let_in = any(self._let_in_one_of(key) for key in in_turn)

    def _let_in_one_of(self, key: str) -> bool:
        """The key's first, if there is room; the key goes to the end of the line."""
        line = self._waiting[key]
        if not self._take(line[0]):
            return False
        line.popleft().let_in.set_result(None)
        del self._waiting[key]
        if line:
            self._waiting[key] = line
        return True

    def _take(self, place: RequestPlace) -> bool:
        sequences = self._fitting(self._sequences, place.choices)
        if not self._sequences.take(place.key, sequences):
            return False
        if not self._prompts.take(place.key, self._fitting(self._prompts, place.tokens)):
            self._sequences.give(place.key, sequences)
            return False
        return True
