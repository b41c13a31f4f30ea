"""What vLLM is told on a DGX Spark beside the plan: what its users found it needs there."""

from __future__ import annotations

from phalanx.models.parsers import vllm_parsers_for
from phalanx.spec.model import ModelSpec

_LATENT_BLOCK = 64
"""Tokens of a KV block that kernels of latent attention are built for."""
_BLOCK = 16


def spark_flags(spec: ModelSpec, model: str) -> tuple[str, ...]:
    """Block size, attention backend, parsers, and the text part alone of a checkpoint that sees images too."""
    thoughts, tools = vllm_parsers_for(spec.model_type, model)
    return (
        *_attention(spec),
        *(("--language-model-only",) if _sees_images(spec, model) else ()),
        *(("--reasoning-parser", thoughts) if thoughts else ()),
        *(("--enable-auto-tool-choice", "--tool-call-parser", tools) if tools else ()),
    )


def _attention(spec: ModelSpec) -> tuple[str, ...]:
    """FlashInfer, but for sinks, which it refuses on sm_121 (vllm#28589), and latent vectors. Where a model keeps
    states, vLLM sizes blocks by those; where it picks few of its vectors, there is one backend, which vLLM knows.
    """
    kinds = {cache.kind for cache in spec.caches}
    mixers = [layer.mixer for layer in spec.layers]
    if any(getattr(mixer, "indexer", None) for mixer in mixers):
        return "--block-size", str(_LATENT_BLOCK)
    if "latent" in kinds:
        return "--attention-backend", "TRITON_MLA", "--block-size", str(_LATENT_BLOCK)
    backend = "TRITON_ATTN" if any(getattr(mixer, "sinks", False) for mixer in mixers) else "FLASHINFER"
    block = () if "state" in kinds else ("--block-size", str(_BLOCK))
    return "--attention-backend", backend, *block


def _sees_images(spec: ModelSpec, model: str) -> bool:
    """Text models inside larger ones are known by their type; Kimi K2.5 keeps the type of its text part."""
    return spec.model_type.endswith("_text") or "kimi-k2.5" in model.lower()
