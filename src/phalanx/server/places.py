"""Places: who may wait for the engine where several keys share it."""

from __future__ import annotations

from phalanx.server.engine_client import EngineClient
from phalanx.server.errors import bad_request, queue_full
from phalanx.server.fairness import Shares
from phalanx.server.supervisor import Supervisor


class RequestPlace:
    """One request's share of the queue, until it is left."""

    def __init__(self, engine: EngineClient, key: str, choices: int) -> None:
        self.engine = engine
        self.key = key
        self.choices = choices


class Places:
    """Lets requests through to the engine. With one key, all that the supervisor admits.

    With several, none has all places to wait; the engine then gives each key its part of every step.
    """

    def __init__(self, supervisor: Supervisor, shared: bool) -> None:
        self.shared = shared
        self._supervisor = supervisor
        self._queue = Shares(0, shared)

    def enter(self, key: str, choices: int) -> RequestPlace:
        """A place, to be left. ApiError if there is none."""
        place = RequestPlace(self._supervisor.admit(choices), key, choices)
        if not self.shared:
            return place
        self._queue.total = self._supervisor.room
        self._check_size(choices)
        if not self._queue.take(key, choices):
            why = f"This key has {self._queue.held(key)} requests here, and leaves the rest to others."
            raise queue_full(why, place.engine.pace.seconds_until(choices))
        return place

    def leave(self, place: RequestPlace) -> None:
        if self.shared:
            self._queue.give(place.key, place.choices)

    def _check_size(self, choices: int) -> None:
        """A request that filled the queue would be refused whenever it comes."""
        most = max(1, self._queue.most_at_once)
        if choices > most:
            raise bad_request(
                f"This request asks for {choices} answers at once. Several keys share the {self._queue.total} places "
                f"of this server: ask for at most {most}.",
                "too_many_answers",
                param="n",
            )
