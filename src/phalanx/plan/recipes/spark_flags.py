"""What vLLM is told on a DGX Spark beside the plan: what its users found it needs there."""

from __future__ import annotations

from phalanx.models.parsers import parsers_for
from phalanx.spec.model import ModelSpec

_LATENT_BLOCK = 64
"""Tokens of a KV block that kernels of latent attention are built for."""
_BLOCK = 16
_SPARSE = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")

_PARSERS = {
    "gpt_oss": ("openai_gptoss", "openai"),
    "deepseek_v3": (None, "deepseek_v3"),
    "deepseek_v32": ("deepseek_v3", "deepseek_v32"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "glm4_moe": ("glm45", "glm45"),
    "glm4_moe_lite": ("glm47", "glm47"),
    "glm_moe_dsa": ("glm47", "glm47"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "mistral": (None, "mistral"),
    "mixtral": (None, "mistral"),
}
"""For thoughts and for calls of tools, by family, where ours have other names or none (vllm/reasoning/__init__.py and
vllm/tool_parsers/__init__.py at 0064cc9, read 2026-11-17)."""


def spark_flags(spec: ModelSpec, model: str) -> tuple[str, ...]:
    """Block size, attention backend, parsers, and the text part alone of a checkpoint that sees images too."""
    ours, theirs = parsers_for(spec.model_type, model), _PARSERS.get(spec.model_type, (None, None))
    thoughts, tools = theirs[0] or ours.reasoning, theirs[1] or ours.tools
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
    if spec.model_type in _SPARSE:
        return "--block-size", str(_LATENT_BLOCK)
    if "latent" in kinds:
        return "--attention-backend", "TRITON_MLA", "--block-size", str(_LATENT_BLOCK)
    backend = "TRITON_ATTN" if spec.model_type == "gpt_oss" else "FLASHINFER"
    block = () if "state" in kinds else ("--block-size", str(_BLOCK))
    return "--attention-backend", backend, *block


def _sees_images(spec: ModelSpec, model: str) -> bool:
    """Text models inside larger ones are known by their type; Kimi K2.5 keeps the type of its text part."""
    return spec.model_type.endswith("_text") or "kimi-k2.5" in model.lower()
