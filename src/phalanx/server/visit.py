"""Visit: one request's way through the engine."""

from __future__ import annotations

from phalanx.server.engine_client import EngineClient
from phalanx.server.errors import ApiError
from phalanx.server.metrics import Metrics
from phalanx.server.places import Places, RequestPlace
from phalanx.server.quotas import Quotas


class Visit:
    """Takes what the key may use, tells metrics of tokens, and leaves its place behind."""

    def __init__(self, places: Places, quotas: Quotas, metrics: Metrics, client: str, tokens: int) -> None:
        self._places = places
        self._quotas = quotas
        self._metrics = metrics
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

    def first_token(self, after_s: float) -> None:
        self._metrics.first_token(after_s)

    def next_token(self, after_s: float) -> None:
        self._metrics.next_token(after_s)

    def leave(self, output_tokens: int) -> None:
        if self._place is not None:
            self._places.leave(self._place)
            self._quotas.spend(self._client, output_tokens)
