"""The model of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, ModelError
from phalanx.models.config import read_config
from phalanx.spec.model import ModelSpec

if TYPE_CHECKING:
    from phalanx.spec.gguf import GgufFile


def keeps_pairs_together(file: GgufFile) -> bool:
    """Whether the two rows of a rotary pair lie side by side."""
    return bool(file.fields["general.architecture"] == "llama")


def gguf_spec(file: GgufFile) -> ModelSpec:
    """The model a file holds, read as the Hugging Face configuration it came from."""
    architecture, experts = file.fields["general.architecture"], file.get("expert_count")
    families = {"llama": "mixtral" if experts else "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
    if architecture not in families:
        raise ModelError(
            "unsupported_architecture",
            f"{file.path.name} is of the architecture {architecture!r}.",
            f"Phalanx reads {', '.join(families)} from GGUF; for others use the safetensors version of the model.",
        )
    _refuse_unread(file)
    family = families[architecture]
    if "rope_freqs.weight" in file.tensors:
        raise ModelError(
            "unsupported_rope",
            f"{file.path.name} stretches its rope by a table of factors (rope_freqs.weight).",
            "Use the safetensors version of this model.",
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            "missing_tensor", f"{file.path.name} has no token_embd.weight.", "Is this a causal language model?"
        )
    heads = file.get("attention.head_count")
    scaling: dict[str, Any] = {"rope_theta": file.get("rope.freq_base", 10000.0)}
    if file.get("rope.scaling.type", "none") != "none":
        scaling |= {
            "rope_type": file.get("rope.scaling.type"),
            "factor": file.get("rope.scaling.factor"),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
    inner = file.get("feed_forward_length")
    return read_config(
        {
            "model_type": family,
            "num_hidden_layers": file.get("block_count"),
            "hidden_size": file.get("embedding_length"),
            "intermediate_size": inner or file.get("expert_feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": file.get("attention.head_count_kv", heads),
            "head_dim": file.get("attention.key_length"),
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": file.get("context_length"),
            "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": scaling,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
        }
        | _told_by_some(file, family)
    )


_UNREAD = {
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Fields that would change what a model computes, with what changes nothing."""


def _refuse_unread(file: GgufFile) -> None:
    like_head_dim = dict.fromkeys(("rope.dimension_count", "attention.value_length"), file.get("attention.key_length"))
    untyped = {} if file.get("rope.scaling.type") else {"rope.scaling.factor": 1.0}
    for key, neutral in (_UNREAD | like_head_dim | untyped).items():
        found = file.get(key)
        if found is not None and neutral is not None and found != neutral:
            raise ModelError(
                "unknown_field",
                f"{file.path.name} has {key} = {found}, which Phalanx does not read from GGUF.",
                "Use the safetensors version of this model.",
            )


def _told_by_some(file: GgufFile, family: str) -> dict[str, Any]:
    """What only some families know of."""
    told: dict[str, Any] = {}
    if "blk.0.attn_q.bias" in file.tensors and "blk.0.attn_output.bias" in file.tensors:
        told["attention_bias"] = True
    if file.get("expert_count"):
        told |= {"num_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count")}
    if family == "qwen3_moe":
        told |= {"moe_intermediate_size": file.get("expert_feed_forward_length"), "norm_topk_prob": True}
    return told
