"""EngineConfig keeps what an engine is started with in one form, whatever name it was asked for by."""

from __future__ import annotations

import inspect
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.cli.serve import serve
from phalanx.errors import ConfigError
from phalanx.llm import LLM
from phalanx.runtime.config import EngineConfig

KEPT_AS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    "dtype", ["float32", "float", "bfloat16", "float16", "half", *KEPT_AS, *KEPT_AS.values()], ids=str
)
def test_a_dtype_is_what_torch_calls_so(dtype: str | torch.dtype) -> None:
    config = EngineConfig(dtype=dtype)  # type: ignore[arg-type]
    asked = dtype if isinstance(dtype, torch.dtype) else KEPT_AS.get(dtype) or getattr(torch, dtype)
    assert KEPT_AS[config.dtype] == asked


def test_auto_stays_for_the_machine_to_choose() -> None:
    assert EngineConfig(dtype="auto").dtype == EngineConfig().dtype == "auto"


def test_a_name_survives_the_way_to_another_process() -> None:
    config = EngineConfig(dtype="half")
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, "torch.", "", None, 16], ids=repr)
def test_other_dtypes_are_refused_with_the_names_that_work(dtype: object) -> None:
    with pytest.raises(ConfigError, match="bfloat16") as refused:
        EngineConfig(dtype=dtype)  # type: ignore[arg-type]
    assert refused.value.code == "bad_option"
    assert repr(dtype) in refused.value.found


def test_a_model_is_computed_in_the_torch_dtype_that_llm_is_given(tiny_llama: Path) -> None:
    def dtype(asked: object) -> torch.dtype:
        with LLM(tiny_llama, dtype=asked, device="cpu", num_blocks=16, max_model_len=64, progress=False) as llm:
            return llm.engine.runner.model.place.dtype  # type: ignore[attr-defined]

    assert [dtype(asked) for asked in (torch.bfloat16, "bfloat16", "float")] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    ]


def test_the_command_line_has_the_same_defaults() -> None:
    flags = inspect.signature(serve).parameters
    for name in ("max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype", "state_dtype", "load_format"):
        assert flags[name].default == getattr(EngineConfig(), name)
