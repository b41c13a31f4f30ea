"""EngineProfile: how an engine schedules, and which family of versions its fitted numbers come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from phalanx.cost.habits import PLAIN_HABITS, EngineHabits
from phalanx.cost.rules import Rules
from phalanx.engine.defaults import MAX_NUM_BATCHED_TOKENS
from phalanx.errors import PhalanxError


class ProfileError(PhalanxError):
    """No profile describes this engine."""


@dataclass(frozen=True)
class EngineProfile:
    """One engine family: versions from `since` on."""

    family: str
    engine: str
    since: tuple[int, ...]
    rules: Rules
    all_reduce: str
    habits: EngineHabits = PLAIN_HABITS


_AHEAD = EngineHabits(overlaps=True)
"""By default: SGLang since 0.4, TensorRT-LLM since 1.0 (overlap scheduler), vLLM since 0.14 (async scheduling)."""
_SGLANG = EngineHabits(overlaps=True, is_eager=True)
_OLDEST_VLLM = EngineHabits(sends_rows=True)
"""Before 0.8 the first rank prepared each step and broadcast it (vllm-project/vllm#6556); since 0.6 it worked on
answers while the GPU ran (async output processor, #7049).
"""
_TENSORRT = EngineHabits(overlaps=True, is_native=True, splits_contexts=False)
"""Before 1.0 TensorRT-LLM ran engines of TensorRT by a batch manager in C++, `multi_block_mode` off unless told."""
_WHOLE = Rules("whole", 8192, kv_reserve=1.0)

PROFILES = (
    EngineProfile("vllm-0.18", "vllm", (0, 13), Rules("mixed", 8192), "vllm", _AHEAD),
    EngineProfile("vllm-0.10", "vllm", (0, 8), Rules("mixed", 8192), "vllm"),
    EngineProfile("vllm-0.7", "vllm", (0, 6), Rules("first", 8192), "vllm", replace(_OLDEST_VLLM, overlaps=True)),
    EngineProfile("vllm-0.5", "vllm", (), Rules("first", 8192), "vllm", _OLDEST_VLLM),
    EngineProfile("sglang-0.5.9", "sglang", (0, 5, 9), Rules("first", 8192), "sglang", _SGLANG),
    EngineProfile("sglang-0.5", "sglang", (), Rules("first", 8192), "sglang", _SGLANG),
    EngineProfile("trtllm-1.1", "trtllm", (1, 1), _WHOLE, "trtllm", _AHEAD),
    EngineProfile("trtllm-1.0", "trtllm", (1,), _WHOLE, "trtllm", _AHEAD),
    EngineProfile("trtllm-0.14", "trtllm", (), _WHOLE, "trtllm", _TENSORRT),
    EngineProfile("phalanx", "phalanx", (), Rules("fair", MAX_NUM_BATCHED_TOKENS), "nccl"),
)
"""Newest family of an engine first. Phalanx was measured on one H200; elsewhere it follows from what bounds it."""


def habits_of(found: EngineProfile, has_states: bool, caches_prefixes: bool = True) -> EngineHabits:
    """SGLang's host does not work ahead where it caches prefixes of models with states, as it does unless told not to
    ("SGLang will automatically close overlap schedule", docs/basic_usage/qwen3.md, read 2026-11-17).
    """
    waits = found.engine == "sglang" and has_states and caches_prefixes
    return replace(found.habits, overlaps=False) if waits else found.habits


_FUSING_CARDS = ("10.0", "10.3")


def all_reduce_of(found: EngineProfile, capability: str) -> str:
    """Whose all-reduce an engine runs on a card. vLLM takes FlashInfer's on B200, with the norm in it: by default
    (docs/design/fusions.md of 0.18), and before that where InferenceX told it to (`enable_fi_allreduce_fusion`).
    """
    return "flashinfer" if found.engine == "vllm" and capability in _FUSING_CARDS else found.all_reduce


def profile(engine: str, version: str = "") -> EngineProfile:
    """The family of this version; a version without a number is taken as the newest."""
    families = [known for known in PROFILES if known.engine == engine]
    if not families:
        names = ", ".join(dict.fromkeys(known.engine for known in PROFILES))
        raise ProfileError("unknown_engine", f"No engine is called {engine!r}.", f"Known: {names}.")
    matched = re.match(r"\d+(?:\.\d+)*", version)
    if matched is None:
        return families[0]
    number = tuple(int(part) for part in matched[0].split("."))
    return next(known for known in families if number >= known.since)
