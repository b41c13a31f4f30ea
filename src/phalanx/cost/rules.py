"""Rules: how an engine fills its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AdmissionRule = Literal["fair", "mixed", "whole", "first", "static"]


@dataclass(frozen=True)
class Rules:
    """`fair`: prompts in chunks beside decodes, and shorter ones pass a long one. `mixed`: the same without passing.
    `whole`: prompts uncut beside decodes. `first`: prompts alone, before any decode. `static`: in batches, of
    which the next begins when the last has ended; no engine does that any more. Where the KV cache is short,
    requests are admitted as if each took its prompt and `kv_reserve` of its output. New requests are looked for behind
    every step with prompts, and behind so many without (`poll_steps`).
    """

    admission: AdmissionRule = "mixed"
    max_batched_tokens: int = 8192
    max_sequences: int = 1024
    kv_reserve: float = 0.75
    poll_steps: int = 1
