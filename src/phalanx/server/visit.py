"""Visit: one request's way through the engine."""

from __future__ import annotations

from phalanx.server.engine_client import EngineClient
from phalanx.server.errors import ApiError
from phalanx.server.places import Places, RequestPlace
from phalanx.server.quotas import Quotas


class Visit:
    """Takes what the key may use, and leaves its place behind."""

    def __init__(self, places: Places, quotas: Quotas, client: str, tokens: int) -> None:
        self._places = places
        self._quotas = quotas
        self._client = client
        self._tokens = tokens
        self._place: RequestPlace | None = None

    def enter(self, choices: int) -> EngineClient:
        self._quotas.take(self._client, self._tokens)
        try:
            self._place = self._places.enter(self._client, choices)
        except ApiError:
            self._quotas.give_back(self._client, self._tokens)
            raise
        return self._place.engine

    def leave(self, output_tokens: int) -> None:
        if self._place is not None:
            self._places.leave(self._place)
            self._quotas.spend(self._client, output_tokens)
