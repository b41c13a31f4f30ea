"""Random gated delta nets, and steps of them by the kernels beside the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta import delta_net_torch
from phalanx.kernels.delta_weights import DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import Quantised, dequantise
from phalanx.kernels.gpu.delta import delta_net
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt
from phalanx.spec.delta import updates_beside

FEW = 1e-2
"""Of the numbers of narrow states, those that may be rounded otherwise."""

Span = tuple[int, int, int]
"""Place, first position, tokens."""


def random_net(
    heads: tuple[int, int], dims: tuple[int, int], kernel: int, dtype: torch.dtype, device: str
) -> DeltaWeights:
    """States that remember some thirty tokens."""
    (k_heads, v_heads), (k_dim, v_dim) = heads, dims
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    taps, norm = torch.randn(channels, kernel) * 0.7, torch.randn(v_dim)
    decay, bias = torch.rand(v_heads) - 4, torch.randn(v_heads)
    wide = (part.to(device) for part in (decay, bias))
    return DeltaWeights(*heads, *dims, taps.to(device, dtype), *wide, norm.to(device, dtype), 1e-6)


class Nets:
    """A net with two sets of states, one for the kernels and one for the definition. Places are as others left them.

    A sequence may have so many rows of one token as `most`, and go on behind any of them. `updates` of them are kept
    beside a state, or as many as usual.

    States narrower than float32 are rounded where they are written, to one of two neighbours where the sums of both
    differ in their last bits: then those of the definition go on for both.
    """

    alike = False
    """Whether all tokens have the same query and key."""

    def __init__(
        self,
        net: DeltaWeights,
        places: int,
        most: int = 1,
        updates: int | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net, self.dtype, self.device = net, net.norm.dtype, net.norm.device
        self.spare = places
        channels, kernel = net.taps.shape
        shape = (2, places + 1, net.v_heads, net.k_dim, net.v_dim)
        self.states = torch.full(shape, float("nan"), device=self.device, dtype=state_dtype)
        ring, self.most = kernel - 1 + most, most
        self.columns = torch.full((places + 1, ring, channels), float("nan"), device=self.device, dtype=self.dtype)
        self.wanted_columns = self.columns.clone()
        size = (places + 1, updates or updates_beside(most), net.v_heads, net.k_dim + net.v_dim + 1)
        kept = torch.full((2, *size), float("nan"), device=self.device)
        since = torch.full((2, places + 1, net.v_heads, net.v_dim), 7, dtype=torch.int32, device=self.device)
        self.pending = [PendingUpdates(*each, most) for each in zip(kept, since, strict=True)]

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        net = self.net
        qkvz = torch.randn(tokens, sum(net.widths) + net.v_heads * net.v_dim).to(self.device, self.dtype)
        if self.alike:
            qkvz[:, : sum(net.widths[:2])] = qkvz[0, : sum(net.widths[:2])]
        return qkvz, (torch.randn(tokens, 2 * net.v_heads) * 2).to(self.device, self.dtype)

    def batch(self, spans: list[Span]) -> AttentionBatch:
        """Both by whole prompts and by tiles, with some of no rows; those of few tokens come first, token by token."""
        empty = torch.empty(0, device=self.device)
        singles = [span for span in spans if span[2] <= self.most]
        decode = None
        if singles:
            rows = [(place, start + at) for place, start, count in singles for at in range(count)]
            slots, positions = (torch.tensor(column, device=self.device) for column in zip(*rows, strict=True))
            apart = all(count == 1 for *_, count in singles)
            decode = DecodeRows(empty.new_empty(self.spare + 1, 1), slots, positions, apart=apart)
        prompts, tiles, first = [], [], sum(count for _, _, count in singles)
        for place, start, count in spans[len(singles) :]:
            prompts.append(PrefillRow(first, count, start, empty, place))
            tiles += tile_prompt(place, first, count, start)
            first += count
        sent = torch.tensor([*tiles, (0, 0, 0, 0, 0)], dtype=torch.int32, device=self.device)
        cut = PrefillTiles(empty, sent, True) if prompts else None
        return AttentionBatch(empty, decode, prompts, cut)

    def check(self, spans: list[Span], atol: float, quantised: bool = False) -> Tensor:
        """A step by the kernels gives what the definition does, and touches the states of its spans alone.

        Rows of one token in the spare place leave nothing there.
        """
        batch = self.batch(spans)
        qkvz, rates = self.inputs(sum(count for _, _, count in spans))
        places = {place for place, *_ in spans} - {self.spare}
        others = [place for place in range(self.spare + 1) if place not in places]
        before = [kept[others].clone() for kept in (self.states[0], self.columns, *self.pending[0][:2])]
        found = delta_net(
            qkvz, rates, self.net, self.states[0], self.columns, batch.decode, batch.tiles, self.pending[0], quantised
        )
        if isinstance(found, Quantised):
            found = dequantise(found.values, found.scales, 1, self.dtype)
            atol = max(atol, 0.07 * float(found.abs().max()))
        plain = replace(batch, tiles=None)
        wanted = delta_net_torch(qkvz, rates, self.net, self.states[1], self.wanted_columns, plain, self.pending[1])
        torch.testing.assert_close(found.float(), wanted.float(), atol=atol, rtol=2 * atol)
        touched = sorted(places)
        self._check_states(touched, atol)
        ours, theirs = ([part[touched] for part in pending[:2]] for pending in self.pending)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol, equal_nan=True)
        columns = self.columns[touched], self.wanted_columns[touched]
        torch.testing.assert_close(*columns, atol=0, rtol=0, equal_nan=True)
        after = [kept[others] for kept in (self.states[0], self.columns, *self.pending[0][:2])]
        torch.testing.assert_close(after, before, atol=0, rtol=0, equal_nan=True)
        return found

    def _check_states(self, touched: list[int], atol: float) -> None:
        ours, theirs = (states[touched] for states in self.states)
        narrow = self.states.dtype != torch.float32
        neighbour = torch.finfo(self.states.dtype).eps if narrow else 0.0
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=max(atol, neighbour), equal_nan=True)
        if narrow:
            differing = (ours != theirs) & ~theirs.isnan()
            assert differing.float().mean() <= max(FEW, atol)
            self.states[0, touched] = theirs
