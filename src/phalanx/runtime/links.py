"""Links: the engine's ends of the channels to its ranks."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.engine.step_plan import Beat
from phalanx.runtime.channel import Context, Keys, Receiver, Sender
from phalanx.runtime.messages import RankReady, RankReport, beat_decoder, report_decoder


class Links:
    """Hears every rank on two sockets, and gives orders to each on one of its own, once the rank has said where.

    `keys` are the engine's and `rank_keys` the public ones of the ranks, where they are on other machines.
    """

    def __init__(
        self,
        context: Context,
        reports: str,
        beats: str,
        token: str,
        keys: Keys | None = None,
        rank_keys: Mapping[int, str] | None = None,
    ) -> None:
        self._context = context
        self._token = token
        self._keys = keys
        self._rank_keys = rank_keys or {}
        self.orders: dict[int, Sender] = {}
        self.reports = Receiver(context, reports, token, keys)
        self.beats = Receiver(context, beats, token, keys)

    def send(self, frames: list[bytes]) -> None:
        for orders in self.orders.values():
            orders.send(*frames)

    def receive(self, timeout_ms: int) -> RankReport | None:
        """The next report, or None."""
        frames = self.reports.receive(timeout_ms)
        if frames is None:
            return None
        report = report_decoder.decode(frames[0])
        if isinstance(report, RankReady):
            peer = self._rank_keys.get(report.rank)
            self.orders[report.rank] = Sender(self._context, report.orders, self._token, keys=self._keys, peer=peer)
        return report

    def next_beat(self, timeout_ms: int) -> Beat | None:
        frames = self.beats.receive(timeout_ms)
        return None if frames is None else beat_decoder.decode(frames[0])
