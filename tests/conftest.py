"""Tiny random checkpoints of every family, saved by transformers, with what transformers itself generates from them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True, database=None)
settings.register_profile("explore", max_examples=1000)
settings.load_profile("steady")

NEW_TOKENS = 64
VOCAB = 512

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 208},
    "llama3_rope": {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32, "vocab_size": 500},
    "qwen3_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 80,
    },
}


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are only seen by the tests marked `cuda`, run by `pytest -m cuda`: all others mean the CPU.

    A process has one thread to compute with: models are tiny, and on cores that others use too, threads that wait for
    each other take twenty times as long.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class Reference:
    """A checkpoint folder, prompts of mixed lengths, and transformers' greedy continuation of each."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]
    logits: Any
    """Of the last prompt, at every position."""


def make_checkpoint(name: str, folder: Path) -> Any:
    """A tiny model with no inert part: norms, biases and routers are random too, so that a wrong one shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    overrides = dict(FAMILIES[name])
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 144,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    config = AutoConfig.for_model(overrides.pop("model_type", name), **(common | overrides))
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    import torch

    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(request.param, folder)
    rng = random.Random(7)
    shared = [rng.randrange(model.config.vocab_size) for _ in range(40)]
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(length)] for length in (1, 5, 17, 48, 83)]
    prompts += [shared + prompts[1], shared + prompts[2]]
    with torch.inference_mode():
        logits = model(torch.tensor([prompts[-1]])).logits[0]
        continuations = [_continue(model, prompt) for prompt in prompts]
    return Reference(folder, prompts, continuations, logits)


def _continue(model: Any, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_llama")
    make_checkpoint("llama", folder)
    return folder
