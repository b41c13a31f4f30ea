"""How the families write their thoughts and their calls of tools: by which parsers to read them."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.models.registry import families


class Parsers(NamedTuple):
    reasoning: str | None = None
    tools: str | None = None


def parsers_for(model_type: str, model_name: str) -> Parsers:
    """The parsers of a model, by its configuration's `model_type` and its name: what it was trained on comes first."""
    name = model_name.lower().replace("_", "-")
    if "deepseek-r1" in name:
        return Parsers("deepseek_r1")
    if "qwq" in name:
        return Parsers("deepseek_r1", "hermes")
    if "hermes" in name:
        return Parsers(None, "hermes")
    family = families().get(model_type)
    return Parsers(*family.parsers(name)) if family is not None else Parsers()


def vllm_parsers_for(model_type: str, model_name: str) -> Parsers:
    """The same under the names that vLLM has for them."""
    ours, theirs = parsers_for(model_type, model_name), _VLLM.get(model_type, Parsers())
    return Parsers(theirs.reasoning or ours.reasoning, theirs.tools or ours.tools)


_VLLM = {
    "gpt_oss": Parsers("openai_gptoss", "openai"),
    "deepseek_v3": Parsers(None, "deepseek_v3"),
    "deepseek_v32": Parsers("deepseek_v3", "deepseek_v32"),
    "deepseek_v4": Parsers("deepseek_v4", "deepseek_v4"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2"),
    "glm4_moe": Parsers("glm45", "glm45"),
    "glm4_moe_lite": Parsers("glm47", "glm47"),
    "glm_moe_dsa": Parsers("glm47", "glm47"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2"),
    "mistral": Parsers(None, "mistral"),
    "mixtral": Parsers(None, "mistral"),
}
"""For thoughts and for calls of tools, by family, where ours have other names or none (vllm/reasoning/__init__.py and
vllm/tool_parsers/__init__.py at 0064cc9, read 2026-11-17)."""
