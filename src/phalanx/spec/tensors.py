"""The tensors of a model, from its numbers: which exist, their shapes, and how ranks share them."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec.model import DeltaNet, Indexer, Mla, ModelSpec, Moe, Split, Tensor


def list_tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """In the order the forward pass meets them."""
    yield Tensor("model.embed_tokens.weight", (spec.vocab, spec.hidden), "vocab")
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        yield Tensor(prefix + "input_layernorm.weight", (spec.hidden,))
        yield from _mixer(spec, layer, prefix)
        yield Tensor(prefix + "post_attention_layernorm.weight", (spec.hidden,))
        if spec.moe is not None and spec.is_sparse(layer):
            yield from _experts(spec, spec.moe, prefix)
        else:
            yield from _mlp(spec, prefix + "mlp.", spec.intermediate, "ffn")
    yield Tensor("model.norm.weight", (spec.hidden,))
    if not spec.tied_embeddings:
        yield Tensor("lm_head.weight", (spec.vocab, spec.hidden), "vocab")


def _mixer(spec: ModelSpec, layer: int, prefix: str) -> Iterator[Tensor]:
    """What lets a token see those before it."""
    if spec.delta is not None and layer in spec.delta.layers:
        yield from _delta_net(spec, spec.delta, prefix + "linear_attn.")
    elif spec.mla is not None:
        yield from _latent_attention(spec, spec.mla, prefix + "self_attn.")
        if spec.indexer is not None and layer in spec.indexer.layers:
            yield from _indexer(spec, spec.indexer, spec.mla, prefix + "self_attn.indexer.")
    else:
        yield from _attention(spec, prefix + "self_attn.")


def _attention(spec: ModelSpec, prefix: str) -> Iterator[Tensor]:
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    gated = 2 * query if spec.query_gate else query
    splits: tuple[tuple[str, int, Split], ...] = (("q", gated, "query"), ("k", kv, "kv"), ("v", kv, "kv"))
    for letter, rows, split in splits:
        yield Tensor(f"{prefix}{letter}_proj.weight", (rows, spec.hidden), split, is_linear=True)
        if spec.qkv_bias:
            yield Tensor(f"{prefix}{letter}_proj.bias", (rows,), split)
    if spec.qk_norm_whole:
        yield Tensor(prefix + "q_norm.weight", (query,), "query")
        yield Tensor(prefix + "k_norm.weight", (kv,), "kv")
    elif spec.qk_norm:
        yield Tensor(prefix + "q_norm.weight", (spec.head_dim,))
        yield Tensor(prefix + "k_norm.weight", (spec.head_dim,))
    if spec.sinks:
        yield Tensor(prefix + "sinks", (spec.heads,), "query")
    yield Tensor(prefix + "o_proj.weight", (spec.hidden, query), "query", axis=1, is_linear=True)
    if spec.output_bias:
        yield Tensor(prefix + "o_proj.bias", (spec.hidden,))


def _latent_attention(spec: ModelSpec, mla: Mla, prefix: str) -> Iterator[Tensor]:
    """What makes the latents is whole on every rank; what the heads make of them is dealt by heads."""
    query = (spec.heads * spec.head_dim, mla.q_rank or spec.hidden)
    if mla.q_rank is None:
        yield Tensor(prefix + "q_proj.weight", query, "query", is_linear=True)
    else:
        yield Tensor(prefix + "q_a_proj.weight", (mla.q_rank, spec.hidden), is_linear=True)
        yield Tensor(prefix + "q_a_layernorm.weight", (mla.q_rank,))
        yield Tensor(prefix + "q_b_proj.weight", query, "query", is_linear=True)
    yield Tensor(prefix + "kv_a_proj_with_mqa.weight", (mla.width, spec.hidden), is_linear=True)
    yield Tensor(prefix + "kv_a_layernorm.weight", (mla.kv_rank,))
    rows = spec.heads * (mla.nope_dim + mla.v_dim)
    yield Tensor(prefix + "kv_b_proj.weight", (rows, mla.kv_rank), "query", is_linear=True)
    yield Tensor(prefix + "o_proj.weight", (spec.hidden, spec.heads * mla.v_dim), "query", axis=1, is_linear=True)


def _indexer(spec: ModelSpec, indexer: Indexer, mla: Mla, prefix: str) -> Iterator[Tensor]:
    yield Tensor(prefix + "wq_b.weight", (indexer.heads * indexer.head_dim, mla.q_rank or spec.hidden), is_linear=True)
    yield Tensor(prefix + "wk.weight", (indexer.head_dim, spec.hidden), is_linear=True)
    yield Tensor(prefix + "k_norm.weight", (indexer.head_dim,))
    yield Tensor(prefix + "k_norm.bias", (indexer.head_dim,))
    yield Tensor(prefix + "weights_proj.weight", (indexer.heads, spec.hidden))


def _delta_net(spec: ModelSpec, delta: DeltaNet, prefix: str) -> Iterator[Tensor]:
    """Dealt by key heads, each with the value heads that share it. The two small projections are never quantised."""
    value, hidden = delta.v_heads * delta.v_dim, spec.hidden
    if delta.fused:
        yield Tensor(prefix + "in_proj_qkvz.weight", (delta.channels + value, hidden), "state", is_linear=True)
        yield Tensor(prefix + "in_proj_ba.weight", (2 * delta.v_heads, hidden), "state")
    else:
        yield Tensor(prefix + "in_proj_qkv.weight", (delta.channels, hidden), "state", is_linear=True)
        yield Tensor(prefix + "in_proj_z.weight", (value, hidden), "state", is_linear=True)
        yield Tensor(prefix + "in_proj_b.weight", (delta.v_heads, hidden), "state")
        yield Tensor(prefix + "in_proj_a.weight", (delta.v_heads, hidden), "state")
    yield Tensor(prefix + "conv1d.weight", (delta.channels, 1, delta.kernel), "state")
    yield Tensor(prefix + "A_log", (delta.v_heads,), "state")
    yield Tensor(prefix + "dt_bias", (delta.v_heads,), "state")
    yield Tensor(prefix + "norm.weight", (delta.v_dim,))
    yield Tensor(prefix + "out_proj.weight", (hidden, value), "state", axis=1, is_linear=True)


def _mlp(spec: ModelSpec, prefix: str, width: int, split: Split) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{prefix}{name}.weight", (width, spec.hidden), split, is_linear=True)
        if spec.mlp_bias:
            yield Tensor(f"{prefix}{name}.bias", (width,), split)
    yield Tensor(prefix + "down_proj.weight", (spec.hidden, width), split, axis=1, is_linear=True)
    if spec.mlp_bias:
        yield Tensor(prefix + "down_proj.bias", (spec.hidden,))


def _experts(spec: ModelSpec, moe: Moe, prefix: str) -> Iterator[Tensor]:
    block, gate, up, down = spec.expert_names
    wide, narrow, copies = (moe.intermediate, spec.hidden), (spec.hidden, moe.intermediate), moe.experts
    yield Tensor(f"{prefix}{block}.gate.weight", (moe.experts, spec.hidden))
    if moe.correction_bias:
        yield Tensor(f"{prefix}{block}.gate.e_score_correction_bias", (moe.experts,))
    if moe.bias:
        yield Tensor(f"{prefix}{block}.gate.bias", (moe.experts,))
    path = f"{prefix}{block}.experts.*."
    yield Tensor(f"{path}{gate}.weight", wide, "expert_ffn", is_linear=True, expert=True, copies=copies)
    yield Tensor(f"{path}{up}.weight", wide, "expert_ffn", is_linear=True, expert=True, copies=copies)
    yield Tensor(f"{path}{down}.weight", narrow, "expert_ffn", axis=1, is_linear=True, expert=True, copies=copies)
    if moe.bias:
        yield Tensor(f"{path}{gate}.bias", (moe.intermediate,), "expert_ffn", expert=True, copies=copies)
        yield Tensor(f"{path}{up}.bias", (moe.intermediate,), "expert_ffn", expert=True, copies=copies)
        yield Tensor(f"{path}{down}.bias", (spec.hidden,), expert=True, copies=copies)
    if moe.shared:
        yield from _mlp(spec, f"{prefix}{block}.shared_experts.", moe.shared, "shared_ffn")
    if moe.shared_gate:
        yield Tensor(f"{prefix}{block}.shared_expert_gate.weight", (1, spec.hidden))
