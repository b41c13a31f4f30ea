"""Random gated delta nets, and steps of them by the kernels beside the definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta import delta_net_torch
from phalanx.kernels.delta_weights import DeltaWeights
from phalanx.kernels.fp8 import Quantised, dequantise
from phalanx.kernels.gpu.delta import delta_net
from phalanx.kernels.tiling import DecodeRows, PrefillTiles, tile_prompt

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
    """A net with two sets of states, one for the kernels and one for the definition. Places are as others left them."""

    alike = False
    """Whether all tokens have the same query and key."""

    def __init__(self, net: DeltaWeights, places: int) -> None:
        self.net, self.dtype, self.device = net, net.norm.dtype, net.norm.device
        self.spare = places
        channels, kernel = net.taps.shape
        self.states = torch.full((2, places + 1, net.v_heads, net.k_dim, net.v_dim), float("nan"), device=self.device)
        self.columns = torch.full((places + 1, kernel, channels), float("nan"), device=self.device, dtype=self.dtype)
        self.wanted_columns = self.columns.clone()

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        net = self.net
        qkvz = torch.randn(tokens, sum(net.widths) + net.v_heads * net.v_dim).to(self.device, self.dtype)
        if self.alike:
            qkvz[:, : sum(net.widths[:2])] = qkvz[0, : sum(net.widths[:2])]
        return qkvz, (torch.randn(tokens, 2 * net.v_heads) * 2).to(self.device, self.dtype)

    def batch(self, spans: list[Span]) -> AttentionBatch:
        """Both by whole prompts and by tiles, with some of no rows; rows of one token come first."""
        empty = torch.empty(0, device=self.device)
        singles = [span for span in spans if span[2] == 1]
        decode = None
        if singles:
            slots, positions = (
                torch.tensor(column, device=self.device) for column in list(zip(*singles, strict=True))[:2]
            )
            decode = DecodeRows(empty.new_empty(self.spare + 1, 1), slots, positions)
        prompts, tiles, first = [], [], len(singles)
        for place, start, count in spans[len(singles) :]:
            prompts.append(PrefillRow(first, count, start, empty, place))
            tiles += tile_prompt(place, first, count, start)
            first += count
        sent = torch.tensor([*tiles, (0, 0, 0, 0, 0)], dtype=torch.int32, device=self.device)
        cut = PrefillTiles(empty, sent, True) if prompts else None
        return AttentionBatch(empty, decode, prompts, cut)

    def check(self, spans: list[Span], atol: float, quantised: bool = False) -> Tensor:
        """A step by the kernels gives what the definition does, and touches the states of its spans alone.

        A row of one token in the spare place leaves no state there.
        """
        batch = self.batch(spans)
        qkvz, rates = self.inputs(sum(count for _, _, count in spans))
        places = {place for place, *_ in spans} - {self.spare}
        others = [place for place in range(self.spare + 1) if place not in places]
        before = self.states[0][others].clone()
        found = delta_net(qkvz, rates, self.net, self.states[0], self.columns, batch.decode, batch.tiles, quantised)
        if isinstance(found, Quantised):
            found = dequantise(found.values, found.scales, 1, self.dtype)
            atol = max(atol, 0.07 * float(found.abs().max()))
        plain = replace(batch, tiles=None)
        wanted = delta_net_torch(qkvz, rates, self.net, self.states[1], self.wanted_columns, plain)
        torch.testing.assert_close(found.float(), wanted.float(), atol=atol, rtol=2 * atol)
        ours, theirs = (states[sorted(places)] for states in self.states)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
        torch.testing.assert_close(self.columns, self.wanted_columns, atol=0, rtol=0, equal_nan=True)
        torch.testing.assert_close(self.states[0][others], before, atol=0, rtol=0, equal_nan=True)
        return found
