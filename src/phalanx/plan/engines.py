"""How the four engines use a GPU's memory and which shapes they accept: what fit and recipes need to know of each."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from phalanx.engine.defaults import MAX_NUM_BATCHED_TOKENS
from phalanx.errors import ConfigError
from phalanx.plan import support
from phalanx.spec.formats import FORMATS, KV_FORMATS
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.step_memory import KEPT_FREE

MIB = 2**20
GIB = 2**30

DRIVER_SHARE = 0.0043
"""Of the memory the driver reports, what it keeps from programs: 140.40 GiB reported, 139.80 GiB usable on an H200."""
CONTEXT_BYTES = int(0.4 * GIB)
"""CUDA context, libraries and allocator slack of one rank."""
COLLECTIVE_BYTES = int(0.45 * GIB)
"""Buffers of the collectives, where there is more than one rank."""
GRAPH_BYTES = int(1.1 * GIB)
"""CUDA graphs; vLLM 0.24 took 0.5 to 1.1 GiB."""

PHALANX_CAPABILITY = (8, 0)
"""What its kernels are built for (`make kernels`): bf16 on tensor cores came with Ampere."""

Budget = Literal["share_of_all", "static_share", "share_of_free", "all_but_a_step"]


@dataclass(frozen=True)
class EngineTraits:
    """An engine's habits.

    `budget` is how it sizes the KV cache: vLLM takes a share of all memory for weights, activations and KV; SGLang a
    static share for weights and KV; TensorRT-LLM a share of what is free once weights and activations are in; Phalanx
    all that is free beside weights, a worst step and the graphs, but for a hundredth of the card. The formats are those
    it loads, and keeps KV in. `support.toml` says on which cards. With `has_cache_groups` layers with windows share the
    blocks of those that keep everything, and a sequence's states have places for copies. With `has_attention_ranks`
    ranks can keep sequences of their own and share the experts alone; with `has_disaggregation` prompts are computed
    on other replicas than answers.
    """

    name: str
    title: str
    version: str
    budget: Budget
    share: float
    weight_formats: tuple[str, ...]
    kv_formats: tuple[str, ...] = KV_FORMATS
    deals_unevenly: bool = False
    keeps_blocks_whole: bool = False
    expert_parallel: bool = False
    has_pipelines: bool = False
    has_attention_ranks: bool = False
    has_disaggregation: bool = False
    has_cache_groups: bool = False
    block_tokens: int = 16

    def batched_tokens(self, gpu: Gpu) -> int:
        """Tokens of one step unless told otherwise."""
        if self.name == "phalanx":
            return MAX_NUM_BATCHED_TOKENS
        return 8192 if gpu.memory_bytes >= 70 * GIB or self.name != "vllm" else 2048

    def refuses_card(self, machine: Machine, number_format: str) -> str | None:
        """Why this engine does not serve the format on some card of the machine."""
        return support.refusal(self.name, self.title, machine, number_format)

    def refusal(self, spec: ModelSpec, number_format: str, kv_format: str) -> str | None:
        """Why this engine cannot load the model in these formats at all."""
        own = spec.refusal if self.name == "phalanx" else None
        if own is not None and (own.code == "unsupported_architecture" or number_format == spec.number_format):
            return own.found
        if number_format not in self.weight_formats:
            return f"{self.title} does not load {number_format}; it loads {', '.join(self.weight_formats)}."
        if kv_format not in self.kv_formats:
            return f"{self.title} does not keep KV as {kv_format}; it keeps {', '.join(self.kv_formats)}."
        return None


_QUANTISED = tuple(name for name in FORMATS if name != "fp32")
ENGINES = {
    traits.name: traits
    for traits in (
        EngineTraits(
            "phalanx",
            "Phalanx",
            "",
            "all_but_a_step",
            1.0 - KEPT_FREE,
            tuple(FORMATS),
            deals_unevenly=True,
            has_cache_groups=True,
        ),
        EngineTraits(
            "vllm",
            "vLLM",
            "0.24",
            "share_of_all",
            0.9,
            _QUANTISED,
            keeps_blocks_whole=True,
            expert_parallel=True,
            has_pipelines=True,
            has_attention_ranks=True,
            has_disaggregation=True,
        ),
        EngineTraits(
            "sglang",
            "SGLang",
            "0.5.9",
            "static_share",
            0.0,
            _QUANTISED,
            keeps_blocks_whole=True,
            expert_parallel=True,
            has_pipelines=True,
            has_attention_ranks=True,
            has_disaggregation=True,
            block_tokens=1,
        ),
        EngineTraits(
            "trtllm",
            "TensorRT-LLM",
            "1.2",
            "share_of_free",
            0.9,
            _QUANTISED,
            expert_parallel=True,
            has_pipelines=True,
            has_attention_ranks=True,
            has_disaggregation=True,
            block_tokens=32,
        ),
    )
}


def engine(name: str) -> EngineTraits:
    """The engine of this name, or a refusal that names the nearest."""
    plain = name.strip().lower().replace("-", "").replace("tensorrtllm", "trtllm").replace("tensorrt_llm", "trtllm")
    if plain in ENGINES:
        return ENGINES[plain]
    near = get_close_matches(plain, ENGINES, n=1, cutoff=0.4)
    suggestion = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError("unknown_engine", f"No engine is called {name!r}.", f"{suggestion}Known: {', '.join(ENGINES)}.")


def static_reserve(tp: int, batched_tokens: int) -> int:
    """What SGLang leaves beside weights and KV: 1.5 MiB a token of a step, graphs, and a share for more ranks."""
    return int((512 + 1.5 * max(batched_tokens, 2048) + 2 * 256 + 128 * tp) * MIB)
