"""Latent attention over a paged cache: of a token, one latent and one rotated key are kept for all heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.attention import AttentionBatch, visible
from phalanx.kernels.cache import take
from phalanx.kernels.indexer import Best, Chosen
from phalanx.kernels.norm import add_rms_norm
from phalanx.kernels.rotary import apply_rotary
from phalanx.kernels.spans import additive, causal, spans

Turns = tuple[Tensor, Tensor]
"""cos and signed sin of every row."""


class Heads(NamedTuple):
    """What a rank's heads make of latents: [heads, nope_dim + v_dim, kv_rank], keys before values."""

    matrices: Tensor
    nope_dim: int

    @property
    def keys(self) -> Tensor:
        return self.matrices[:, : self.nope_dim]

    @property
    def values(self) -> Tensor:
        return self.matrices[:, self.nope_dim :]


def keep_latents(entered: Tensor, weight: Tensor, eps: float, turns: Turns, write_to: Tensor, cache: Tensor) -> Tensor:
    """Norm the latents and turn the keys in `entered`, [tokens, kv_rank + rope_dim], into the cache; what was kept."""
    if entered.is_cuda:
        from phalanx.kernels.gpu import latent_rows as gpu

        return gpu.keep_latents(entered, weight, eps, *turns, write_to, cache)
    rank = len(weight)
    latent = add_rms_norm(entered[:, :rank], None, weight, eps)
    kept = torch.cat((latent, apply_rotary(entered[:, None, rank:], *turns)[:, 0]), -1)
    cache.flatten(0, 1)[write_to] = kept
    return kept


def latent_attention(
    q: Tensor,
    turns: Turns,
    kept: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    heads: Heads,
    scale: float,
    chosen: Chosen | Best | None,
) -> Tensor:
    """Attend with q, [tokens, heads, nope_dim + rope_dim], not turned yet; [tokens, heads, v_dim].

    What is `kept` of these tokens, [tokens, kv_rank + rope_dim], is cached already.
    """
    if q.is_cuda:
        return latent_attention_gpu(q, turns, kept, cache, batch, heads, scale, chosen)
    assert not isinstance(chosen, Best)
    q = torch.cat((q[..., : heads.nope_dim], apply_rotary(q[..., heads.nope_dim :], *turns)), -1)
    return latent_attention_torch(q, cache, batch, heads, scale, chosen)


def latent_attention_gpu(
    q: Tensor,
    turns: Turns,
    kept: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    heads: Heads,
    scale: float,
    chosen: Chosen | Best | None,
) -> Tensor:
    """Prompts that all begin in this step are widened; where others go on, all are attended where latents are."""
    from phalanx.kernels.gpu import latent as gpu
    from phalanx.kernels.gpu import latent_prompts

    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    tiles, rank, by_itself = batch.tiles, kept.shape[1] - turns[0].shape[-1], isinstance(chosen, Best)
    resumed = tiles is not None and tiles.resumed
    rows = len(q) if by_itself or resumed else 0 if batch.decode is None else len(batch.decode.positions)
    if rows:
        brought, attended = q.new_empty(rows, q.shape[1], rank), q.new_empty(rows, q.shape[1], rank)
        by_heads(q[:rows, :, : heads.nope_dim], heads.keys, brought)
        asked = gpu.LatentQueries(brought, q, *turns)
        if isinstance(chosen, Best):
            gpu.decode_latents(asked, cache, chosen.rows, scale, attended, chosen.positions)
        else:
            if batch.decode is not None:
                gpu.decode_latents(asked, cache, batch.decode, scale, attended)
            if tiles is not None and resumed:
                gpu.prefill_latents(asked, cache, tiles, scale, attended)
        by_heads(attended, heads.values.transpose(1, 2), out[:rows])
    if tiles is not None and not resumed and not by_itself:
        wide = kept[:, :rank] @ heads.matrices.flatten(0, 1).t()
        latent_prompts.prefill_wide(q, *turns, wide, kept, tiles, scale, out)
    return out


def by_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """x, [tokens, heads, inputs], each head by its own matrix, [heads, inputs, outputs]."""
    if x.is_cuda:
        from phalanx.kernels.gpu import latent_rows as gpu

        if len(x) <= gpu.FEW_ROWS:
            gpu.by_heads(x, matrices, out)
            return
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))


def latent_attention_torch(
    q: Tensor, cache: Tensor, batch: AttentionBatch, heads: Heads, scale: float, chosen: Chosen | None
) -> Tensor:
    """The definition, of queries that are turned.

    Rows of one token do not widen what is cached: queries are brought to where latents are, and what is attended back.
    """
    out = q.new_empty(*q.shape[:2], heads.values.shape[1])
    if batch.decode is not None:
        table, positions = batch.decode.block_table, batch.decode.positions
        rows = len(positions)
        seen = visible(positions[:, None], torch.arange(table.shape[1] * cache.shape[1], device=q.device), None)
        mask = chosen.decode if chosen is not None and chosen.decode is not None else additive(seen, q.dtype)
        kept = take(cache, table.flatten(), q.dtype).view(rows, -1, cache.shape[-1])
        kept = kept.masked_fill(~seen[..., None], 0.0)  # what others left there may be no numbers
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
