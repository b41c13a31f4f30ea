"""The gated delta rule: a state a head that each token decays, corrects and reads; and the convolution before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch

CHUNK = 64
"""Tokens of a prompt whose corrections are solved for together."""

_LEAST_SQUARES = 1e-6


class DeltaRows(NamedTuple):
    """What the rule takes of each token, all in float32: q and k are [tokens, heads, k_dim], v [tokens, heads, v_dim].

    A token multiplies the state by exp(`decay`) and moves what it reads at k by `beta` towards v, both
    [tokens, heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def span(self, first: int, stop: int) -> DeltaRows:
        return DeltaRows(*(part[first:stop] for part in self))


def convolve(x: Tensor, taps: Tensor, kept: Tensor, batch: AttentionBatch) -> Tensor:
    """SiLU of each channel's sum over its last tokens: x is [tokens, channels], taps [kernel, channels].

    `kept` is [places, kernel - 1, channels]: what a sequence's next token looks back on.
    """
    out = torch.empty_like(x)
    if batch.decode is not None:
        slots, positions = batch.decode.slots, batch.decode.positions
        window = torch.cat((_begun(kept[slots], positions), x[: len(positions), None]), 1)
        out[: len(positions)] = _weigh(window.transpose(0, 1), taps, x.dtype)
        kept[slots] = window[:, 1:]
    for row in batch.prefills:
        span = slice(row.first, row.first + row.count)
        before = kept[row.slot] if row.start else torch.zeros_like(kept[row.slot])
        seen = torch.cat((before, x[span]))
        out[span] = _weigh(seen.unfold(0, row.count, 1).movedim(-1, 1), taps, x.dtype)
        kept[row.slot] = seen[row.count :]
    return out


def _weigh(seen: Tensor, taps: Tensor, dtype: torch.dtype) -> Tensor:
    """`seen` is [kernel, rows, channels]: what each tap meets. Summed in float32."""
    total = seen[0].float() * taps[0]
    for columns, tap in zip(seen[1:], taps[1:], strict=True):
        total.addcmul_(columns.float(), tap)
    return F.silu(total.to(dtype))


def delta_rule(rows: DeltaRows, states: Tensor, batch: AttentionBatch) -> Tensor:
    """What every token reads, [tokens, heads, v_dim]; `states`, [places, heads, k_dim, v_dim], go on from there."""
    out = torch.empty_like(rows.v)
    if batch.decode is not None:
        slots, positions = batch.decode.slots, batch.decode.positions
        begun = _begun(states[slots], positions)
        out[: len(positions)], states[slots] = delta_step(rows.span(0, len(positions)), begun)
    for row in batch.prefills:
        state = states[row.slot] if row.start else torch.zeros_like(states[row.slot])
        stop = row.first + row.count
        out[row.first : stop], states[row.slot] = delta_prompt(rows.span(row.first, stop), state)
    return out


def _begun(kept: Tensor, positions: Tensor) -> Tensor:
    """What rows at these positions go on from, in place: at 0, whatever was in their places, nothing."""
    return kept.masked_fill_((positions == 0).view(-1, *[1] * (kept.dim() - 1)), 0.0)


def delta_step(rows: DeltaRows, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token a sequence: what each reads, and the states behind it, which are those given, overwritten."""
    states.mul_(rows.decay.exp()[..., None, None])
    wrong = rows.v - (rows.k[..., None, :] @ states)[..., 0, :]
    moved = (wrong * rows.beta[..., None])[..., None, :]
    states.flatten(0, 1).baddbmm_(rows.k[..., None].flatten(0, 1), moved.flatten(0, 1))
    return (rows.q[..., None, :] @ states)[..., 0, :], states


def delta_prompt(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence in order: what each reads, and the state behind the last."""
    read = []
    for first in range(0, len(rows.q), CHUNK):
        out, state = _delta_chunk(rows.span(first, first + CHUNK), state)
        read.append(out)
    return torch.cat(read), state


def _delta_chunk(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a token corrects depends on all corrections before it: a triangular system, solved for all at once."""
    q, k, v, decay, beta = (part.transpose(0, 1) for part in rows)
    since = decay.cumsum(1)
    later = torch.ones(len(rows.q), len(rows.q), dtype=torch.bool, device=q.device).triu_(1)
    between = (since[:, :, None] - since[:, None, :]).masked_fill_(later, float("-inf")).exp_()
    fade, rest = since.exp()[..., None], (since[:, -1:] - since).exp()[..., None]
    corrected = (k @ k.transpose(1, 2)) * between * beta[..., None]
    wrong = (v - (k * fade) @ state) * beta[..., None]
    moved = torch.linalg.solve_triangular(corrected, wrong, upper=False, unitriangular=True)
    read = (q * fade) @ state + ((q @ k.transpose(1, 2)) * between) @ moved
    return read.transpose(0, 1), state * fade[:, -1:] + (k * rest).transpose(1, 2) @ moved


def unit_length(x: Tensor) -> Tensor:
    """Each head's vector in float32, scaled to length 1."""
    wide = x.float()
    return wide * (wide.pow(2).sum(-1, keepdim=True) + _LEAST_SQUARES).rsqrt()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm over the last dimension, times SiLU of the gate, which is taken in float32."""
    wide = x.to(dtype).float()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(dtype) * F.silu(gate.float())).to(dtype)
