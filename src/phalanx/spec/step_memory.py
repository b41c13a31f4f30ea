"""What a step of Phalanx takes of a rank's memory beside weights, keys and values, for the runtime and the planner."""

from __future__ import annotations

from phalanx.spec.layout import Layout

KEPT_FREE = 0.01
"""Of a GPU's memory, for what fragments of it cannot be used."""
SYSTEM_SHARE = 0.15
"""Of memory that a GPU shares with its system, what stays with the system and the network buffers."""
DRAWN_SCORE_BYTES, PENALISED_SCORE_BYTES = 56, 12
"""What is made of one score, all that exists at once: where it is drawn from, and while it is changed."""
MOST_PENALTY_BYTES = 256 * 2**20
"""Rows with penalties are worked off a few at a time, so many that this holds them."""

REPORTED_SCORE_BYTES, MOST_REPORTED_BYTES = 20, 256 * 2**20
"""What is made of a score whose token is part of a prompt that is reported on, and what so many at once may take."""

_BYTES_PER_SCORE, _BYTES_PER_TOKEN = 4, 80
"""What penalties take beside the scores: a count for each of them, and a few numbers for every token of the past."""


def layer_bytes(layout: Layout, rank: int, tokens: int, value_bytes: int, mixer_bytes: int = 0) -> int:
    """About what the widest layer takes. A mixer may tell what it needs itself, if that is more than attention does."""
    spec, shard = layout.spec, layout.shards[rank]
    attention = 2 * (len(shard.query_heads) + len(shard.kv_heads)) * spec.head_dim
    routed = spec.moe.experts_per_token * (3 * len(shard.expert_ffn) + spec.hidden) if spec.moe is not None else 0
    widest = max(tokens * value_bytes * max(attention, 3 * len(shard.ffn), routed), mixer_bytes)
    return tokens * value_bytes * (4 + spec.streams) * spec.hidden + widest


def score_bytes(rows: int, vocab: int, longest: int, tokens: int) -> int:
    """What the scores of so many rows take, with everything on that a request can ask of the sampler; or those of a
    step's `tokens`, if they are prompts that are reported on.
    """
    penalised = rows * vocab * PENALISED_SCORE_BYTES + penalty_bytes(rows, vocab, longest)
    reported = min(tokens, reported_at_once(vocab)) * vocab * REPORTED_SCORE_BYTES
    return max(rows * vocab * DRAWN_SCORE_BYTES, penalised, reported)


def reported_at_once(vocab: int) -> int:
    """Tokens of prompts whose scores are looked at together."""
    return max(1, MOST_REPORTED_BYTES // (REPORTED_SCORE_BYTES * vocab))


def penalty_bytes(rows: int, vocab: int, longest: int) -> int:
    """The most that penalties take at once."""
    row = penalised_row_bytes(vocab, longest)
    return max(row, min(rows * row, MOST_PENALTY_BYTES))


def penalised_row_bytes(vocab: int, tokens: int) -> int:
    return _BYTES_PER_SCORE * vocab + _BYTES_PER_TOKEN * tokens
