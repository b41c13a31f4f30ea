"""Latent attention over a paged cache: of a token, one latent and one rotated key are kept for all heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, PrefillRow, visible
from phalanx.kernels.cache import take


class Heads(NamedTuple):
    """What a rank's heads make of latents: keys [heads, nope_dim, kv_rank] and values [heads, v_dim, kv_rank]."""

    keys: Tensor
    values: Tensor


class Chosen(NamedTuple):
    """The positions an indexer lets each row look at, as masks to be added to scores: of the rows of one token
    together, [rows, positions], and of each prompt, [its tokens, positions].
    """

    decode: Tensor | None
    prompts: list[Tensor]


def spans(batch: AttentionBatch, block_size: int) -> list[PrefillRow]:
    """The prompts of a step, on a GPU too."""
    if batch.tiles is None:
        return batch.prefills
    starts: dict[int, list[int]] = {}
    for sequence, first, count, start, _ in batch.tiles.tiles.tolist():
        if count:
            known = starts.setdefault(sequence, [first, first + count, start])
            known[:] = min(known[0], first), max(known[1], first + count), min(known[2], start)
    tables = batch.tiles.tables
    return [
        PrefillRow(
            first,
            stop - first,
            start,
            tables[sequence, : -(-(start + stop - first) // block_size)].long(),
            sequence,
        )
        for sequence, (first, stop, start) in starts.items()
    ]


def causal(row: PrefillRow, dtype: torch.dtype) -> Tensor:
    positions = torch.arange(row.start + row.count, device=row.blocks.device)
    return additive(visible(positions[row.start :, None], positions, None), dtype)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def latent_attention(
    q: Tensor, cache: Tensor, batch: AttentionBatch, heads: Heads, scale: float, chosen: Chosen | None
) -> Tensor:
    """Attend with q, [tokens, heads, nope_dim + rope_dim], whose latents are cached; [tokens, heads, v_dim].

    Rows of one token do not widen what is cached: queries are brought to where latents are, and what is attended back.
    """
    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    if batch.decode is not None:
        table, positions = batch.decode.block_table, batch.decode.positions
        rows = len(positions)
        if chosen is not None and chosen.decode is not None:
            mask = chosen.decode
        else:
            keys = torch.arange(table.shape[1] * cache.shape[1], device=q.device)
            mask = additive(visible(positions[:, None], keys, None), q.dtype)
        kept = take(cache, table.flatten(), q.dtype).view(rows, -1, cache.shape[-1])
        out[:rows] = _absorbed(q[:rows], kept, mask, heads, scale)
    for index, row in enumerate(spans(batch, cache.shape[1])):
        span = slice(row.first, row.first + row.count)
        mask = causal(row, q.dtype) if chosen is None else chosen.prompts[index]
        kept = take(cache, row.blocks, q.dtype).flatten(0, 1)[: row.start + row.count]
        out[span] = _widened(q[span], kept, mask, heads, scale)
    return out


def _absorbed(q: Tensor, kept: Tensor, mask: Tensor, heads: Heads, scale: float) -> Tensor:
    nope, rank = heads.keys.shape[1], heads.keys.shape[2]
    q = torch.cat((torch.einsum("thn,hnr->thr", q[..., :nope], heads.keys), q[..., nope:]), -1)
    attended = F.scaled_dot_product_attention(
        q[:, None], kept[:, None], kept[:, None, :, :rank], attn_mask=mask[:, None, None], scale=scale
    )[:, 0]
    return torch.einsum("thr,hvr->thv", attended, heads.values)


def _widened(q: Tensor, kept: Tensor, mask: Tensor, heads: Heads, scale: float) -> Tensor:
    latents, turned = kept.split([heads.keys.shape[2], kept.shape[-1] - heads.keys.shape[2]], -1)
    keys = torch.einsum("tr,hnr->htn", latents, heads.keys)
    keys = torch.cat((keys, turned.expand(len(keys), -1, -1)), -1)
    values = torch.einsum("tr,hvr->htv", latents, heads.values)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale
    )
    return attended[0].transpose(0, 1)


def choose(q: Tensor, weights: Tensor, keys: Tensor, batch: AttentionBatch, top_k: int, dtype: torch.dtype) -> Chosen:
    """The best `top_k` positions of every row: by the sum over index heads of weight * relu(q . key).

    q is [tokens, index_heads, head_dim], `weights` [tokens, index_heads] and the cached `keys` [blocks, block_size,
    head_dim].
    """
    decode: Tensor | None = None
    if batch.decode is not None:
        table, positions = batch.decode.block_table, batch.decode.positions
        rows = len(positions)
        kept = keys[table.flatten()].view(rows, -1, keys.shape[-1])
        scores = torch.einsum("thd,tsd->ths", q[:rows].float(), kept.float()).relu_()
        allowed = visible(positions[:, None], torch.arange(kept.shape[1], device=q.device), None)
        decode = _best(torch.einsum("th,ths->ts", weights[:rows], scores), allowed, top_k, dtype)
    prompts = []
    for row in spans(batch, keys.shape[1]):
        span = slice(row.first, row.first + row.count)
        kept = keys[row.blocks].flatten(0, 1)[: row.start + row.count]
        scores = torch.einsum("thd,sd->ths", q[span].float(), kept.float()).relu_()
        positions = torch.arange(len(kept), device=q.device)
        allowed = visible(positions[row.start :, None], positions, None)
        prompts.append(_best(torch.einsum("th,ths->ts", weights[span], scores), allowed, top_k, dtype))
    return Chosen(decode, prompts)


def _best(scores: Tensor, allowed: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    scores = scores.masked_fill(~allowed, float("-inf"))
    best = scores.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    return additive(torch.zeros_like(allowed).scatter_(-1, best, True) & allowed, dtype)
