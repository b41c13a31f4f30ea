"""The gated delta net: a convolution, and a state a head that each token decays, corrects and reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow
from phalanx.kernels.delta_weights import CHUNK, DeltaWeights, PendingUpdates
from phalanx.kernels.fp8 import Quantised
from phalanx.kernels.tiling import DecodeRows

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


def delta_net(
    qkvz: Tensor,
    rates: Tensor,
    net: DeltaWeights,
    states: Tensor,
    columns: Tensor,
    batch: AttentionBatch,
    quantised: bool = False,
    pending: PendingUpdates | None = None,
) -> Tensor | Quantised:
    """What a net makes of its projections, [tokens, v_heads * v_dim], as its last product takes it; a GPU brings it to
    FP8 if asked.

    `qkvz` are queries, keys, values and gates, `rates` what betas and decays come from. `states` and `columns`, which
    lie by place, go on from there. Only with `pending`, which a GPU needs, rows of one token may be several of a
    sequence: then it may go on behind any of them.
    """
    if qkvz.is_cuda:
        from phalanx.kernels.gpu import delta as gpu

        assert pending is not None, "kernels write a state once in a while"
        return gpu.delta_net(qkvz, rates, net, states, columns, batch.decode, batch.tiles, pending, quantised)
    return delta_net_torch(qkvz, rates, net, states, columns, batch, pending)


def delta_net_torch(
    qkvz: Tensor,
    rates: Tensor,
    net: DeltaWeights,
    states: Tensor,
    columns: Tensor,
    batch: AttentionBatch,
    pending: PendingUpdates | None = None,
) -> Tensor:
    """The definition."""
    channels = sum(net.widths)
    mixed = convolve(qkvz[:, :channels], net.taps.t().float(), columns, batch)
    read = delta_rule(rows_of(mixed, rates, net), states, batch, pending)
    gate = qkvz[:, channels:].view(read.shape)
    return gated_norm(read, gate, net.norm, net.eps, qkvz.dtype).flatten(1)


def prompts_of(batch: AttentionBatch) -> list[PrefillRow]:
    """The prompts of a batch, whole again where they were cut: the last tile of each comes first and tells of all."""
    if batch.tiles is None:
        return batch.prefills
    found, goes_on = [], None
    for place, first, count, start, begins in batch.tiles.tiles.tolist():
        if count and goes_on != (place, start + count):
            found.append(PrefillRow(first - start + begins, start + count - begins, begins, batch.write_to, place))
        goes_on = place, start
    return found


def rows_of(mixed: Tensor, rates: Tensor, net: DeltaWeights) -> DeltaRows:
    """What the rule takes; value heads that share a key head each have a copy of its queries and keys."""
    q, k, v = (
        part.unflatten(1, (heads, -1))
        for part, heads in zip(mixed.split(net.widths, -1), (net.k_heads, net.k_heads, net.v_heads), strict=True)
    )
    q, k = (unit_length(part).repeat_interleave(net.v_heads // net.k_heads, 1) for part in (q, k))
    beta, slow = rates.chunk(2, -1)
    decay = -net.decay.exp() * F.softplus(slow.float() + net.decay_bias)
    return DeltaRows(q * net.k_dim**-0.5, k, v.float(), decay, beta.sigmoid().float())


def convolve(x: Tensor, taps: Tensor, kept: Tensor, batch: AttentionBatch) -> Tensor:
    """SiLU of each channel's sum over its last tokens: x is [tokens, channels], taps [kernel, channels].

    `kept` is [places, ring, channels]: the last tokens of a sequence, each at its position modulo the ring. There is
    room for the tokens of a step while those before it are still looked at, and when it goes on before its last ones.
    """
    out, kernel, ring = torch.empty_like(x), len(taps), kept.shape[1]
    back = torch.arange(1 - kernel, 0, device=x.device)
    if batch.decode is not None:
        slots, positions = batch.decode.slots, batch.decode.positions
        before = _looked_back(kept[slots], positions[:, None] + back)
        if ring > kernel:
            before = _with_own(before, x, back, batch.decode)
        window = torch.cat((before, x[: len(positions), None]), 1)
        out[: len(positions)] = _weigh(window.transpose(0, 1), taps, x.dtype)
        kept[slots, positions % ring] = x[: len(positions)]
    for row in prompts_of(batch):
        span = slice(row.first, row.first + row.count)
        before = _looked_back(kept[row.slot][None], row.start + back[None])[0]
        seen = torch.cat((before, x[span]))
        out[span] = _weigh(seen.unfold(0, row.count, 1).movedim(-1, 1), taps, x.dtype)
        last = torch.arange(max(0, row.count - kernel), row.count, device=x.device)
        kept[row.slot, (row.start + last) % ring] = x[row.first + last]
    return out


def _with_own(before: Tensor, x: Tensor, back: Tensor, decode: DecodeRows) -> Tensor:
    """What rows look back on, with the rows before them where these are of the same sequence."""
    firsts, counts = decode.sequences
    row = torch.arange(len(decode.slots), device=x.device)
    looked_at = row[:, None] + back
    own = looked_at >= firsts.repeat_interleave(counts)[:, None]
    return torch.where(own[..., None], x[looked_at.clamp(min=0)], before)


def _looked_back(kept: Tensor, positions: Tensor) -> Tensor:
    """The tokens of sequences at these positions, which lie no further back than they are kept; before 0, zeros."""
    ring = (positions % kept.shape[1])[..., None].expand(-1, -1, kept.shape[2])
    return kept.gather(1, ring).masked_fill_(positions[..., None] < 0, 0.0)


def _weigh(seen: Tensor, taps: Tensor, dtype: torch.dtype) -> Tensor:
    """`seen` is [kernel, rows, channels]: what each tap meets. Summed in float32."""
    total = seen[0].float() * taps[0]
    for columns, tap in zip(seen[1:], taps[1:], strict=True):
        total.addcmul_(columns.float(), tap)
    return F.silu(total.to(dtype))


def delta_rule(rows: DeltaRows, states: Tensor, batch: AttentionBatch, pending: PendingUpdates | None = None) -> Tensor:
    """What every token reads, [tokens, heads, v_dim]; `states`, [places, heads, k_dim, v_dim], go on from there.

    They may be narrower than float32, which all is computed in: they are rounded where they are written.
    """
    out = torch.empty_like(rows.v)
    if batch.decode is not None:
        slots, positions = batch.decode.slots, batch.decode.positions
        few = rows.span(0, len(positions))
        if pending is None:
            out[: len(positions)], moved = delta_step(few, _begun(states[slots].float(), positions))
            states[slots] = moved.to(states.dtype)
        else:
            out[: len(positions)] = delta_rows(few, states, batch.decode, pending)
    for row in prompts_of(batch):
        state = states[row.slot].float() if row.start else torch.zeros_like(states[row.slot], dtype=torch.float32)
        stop = row.first + row.count
        if pending is not None:
            slot, start = (torch.tensor([number], device=state.device) for number in (row.slot, row.start))
            state = _caught_up(state[None], pending, slot, start)[0]
            pending.since[row.slot] = row.start + row.count
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


def delta_rows(rows: DeltaRows, states: Tensor, decode: DecodeRows, pending: PendingUpdates) -> Tensor:
    """A few tokens of each sequence: what each reads. What they do to the states stays pending.

    Sequences are filled up to the longest of them with any tokens: nobody looks at what comes behind.
    """
    firsts, counts = decode.sequences
    slots, positions = decode.slots[firsts], decode.positions[firsts]
    coming = pending.most + (1 if decode.apart else pending.most)
    is_full = (positions + coming > pending.since[slots, 0, 0] + pending.tokens) | (positions == 0)
    state = _caught_up(_begun(states[slots].float(), positions), pending, slots, positions)
    states[slots[is_full]] = state[is_full].to(states.dtype)
    pending.since[slots[is_full]] = positions[is_full].to(torch.int32)[:, None, None]
    number = torch.arange(int(counts.max()), device=slots.device)
    known = number < counts[:, None]
    each = (firsts[:, None] + number).clamp(max=len(decode.slots) - 1)
    filled = DeltaRows(*(part[each].transpose(1, 2) for part in rows))
    read, moved = (part.transpose(1, 2)[known] for part in _solved(filled, state))
    update = torch.cat((rows.k, moved, rows.decay[..., None]), -1)
    pending.updates[decode.slots, decode.positions % pending.tokens] = update
    return read


def _caught_up(states: Tensor, pending: PendingUpdates, slots: Tensor, positions: Tensor) -> Tensor:
    """States of these slots, overwritten with what they are before these positions: with the updates that stand."""
    begin = torch.maximum(pending.since[slots, 0, 0], positions - pending.tokens)
    most = int((positions - begin).max())
    if most <= 0:
        return states
    at = begin[:, None] + torch.arange(most, device=slots.device)
    entries = pending.updates[slots[:, None], at % pending.tokens]
    entries.masked_fill_((at >= positions[:, None])[..., None, None], 0.0)
    k, moved, decay = entries.transpose(1, 2).split((*states.shape[2:], 1), -1)
    return _moved_on(states, k, moved, decay[..., 0])


def delta_prompt(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence in order: what each reads, and the state behind the last, which is the one given,
    overwritten.
    """
    read = []
    for first in range(0, len(rows.q), CHUNK):
        chunk = DeltaRows(*(part.transpose(0, 1) for part in rows.span(first, first + CHUNK)))
        out, moved = _solved(chunk, state)
        state = _moved_on(state, chunk.k, moved, chunk.decay)
        read.append(out.transpose(0, 1))
    return torch.cat(read), state


def _solved(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """What tokens read and what they move the state by, each [..., heads, tokens, v_dim] as all that is given.

    What a token corrects depends on all corrections before it: a triangular system, solved for all at once.
    """
    q, k, v, decay, beta = rows
    since = decay.cumsum(-1)
    later = torch.ones(since.shape[-1], since.shape[-1], dtype=torch.bool, device=q.device).triu_(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    fade = since.exp()[..., None]
    corrected = (k @ k.mT) * between * beta[..., None]
    by_query, by_key = (torch.cat((q * fade, k * fade), -2) @ state).chunk(2, -2)
    wrong = (v - by_key) * beta[..., None]
    moved = torch.linalg.solve_triangular(corrected, wrong, upper=False, unitriangular=True)
    return by_query + ((q @ k.mT) * between) @ moved, moved


def _moved_on(state: Tensor, k: Tensor, moved: Tensor, decay: Tensor) -> Tensor:
    """The state behind tokens that move it by so much, which is the one given, overwritten."""
    since = decay.cumsum(-1)
    rest = (since[..., -1:] - since).exp()[..., None]
    state.mul_(since[..., -1].exp()[..., None, None])
    each, *parts = (part.flatten(end_dim=-3) for part in (state, (k * rest).mT, moved))
    each.baddbmm_(*parts)
    return state


def unit_length(x: Tensor) -> Tensor:
    """Each head's vector in float32, scaled to length 1."""
    wide = x.float()
    return wide * (wide.pow(2).sum(-1, keepdim=True) + _LEAST_SQUARES).rsqrt()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm over the last dimension, times SiLU of the gate, which is taken in float32."""
    wide = x.to(dtype).float()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(dtype) * F.silu(gate.float())).to(dtype)
