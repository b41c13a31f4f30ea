"""The benchmark of single products runs those of the model: every shape in every layer that has it."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phalanx.kernels.pairs import Unsummed
from phalanx.runtime.config import EngineConfig

SMALL = {"hidden_size": 256, "vocab_size": 512}
FEW_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("llama-3.3-70b-awq", LLAMA, {"Gemm 1024x256", "Gemm 256x512", "Gemm 768x256", "Gemm 256x384"}),
    ("qwen3.5-35b-a3b-fp8", FEW_EXPERTS, {"experts, 8 of 8", "norm, router 8x256 and choice"}),
    ("gpt-oss-20b", {"intermediate_size": 128}, {"Gemm 5120x256", "Gemm 256x4096"}),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("products")
    monkeypatch.setattr(module, "LAYERS", 4)
    monkeypatch.setattr(module, "EngineConfig", partial(EngineConfig, dtype="fp32"))
    return module


@pytest.mark.parametrize(("name", "size", "among"), CASES, ids=[case[0] for case in CASES])
def test_every_product_runs_in_all_layers(
    products: ModuleType, name: str, size: dict[str, Any], among: set[str]
) -> None:
    model = products.some_layers(products.MODELS[name] | SMALL | size)
    works = {work.name: work for work in products.works(model, 5)}
    assert among <= set(works)
    assert sum(len(work.runs) for work in works.values()) >= 4 * 2
    for work in works.values():
        for run in work.runs:
            made = run()
            assert len(made.weights if isinstance(made, Unsummed) else made) == 5
        assert work.flops % 10 == 0
        assert work.moved > 0


def test_experts_are_counted_as_chosen(products: ModuleType) -> None:
    size = {"intermediate_size": 128, "num_local_experts": 64, "num_experts_per_tok": 4}
    model = products.some_layers(products.MODELS["gpt-oss-20b"] | SMALL | size)
    (one,) = [work for work in products.works(model, 1) if work.name.startswith("experts")]
    assert one.name == "experts, 4 of 64"
    assert one.flops == 2 * 4 * 3 * 128 * 256
    assert one.moved == 4 * 4 * 3 * 128 * 256 + 2 * 4 * 256
