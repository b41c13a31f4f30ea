"""What the linear layers of a model are given: the rows that calibration goes by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.defaults import BLOCK_SIZE
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import ConfigError
from phalanx.kernels.fp8 import Quantised
from phalanx.layers.decoder import Decoder
from phalanx.layers.ffn.dense import Mlp
from phalanx.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.llm import LLM
from phalanx.runtime.runner import TorchRunner

ROWS = 256
"""Kept of every layer."""
_WINDOW = 128
_TEXTS_AT_ONCE = 8


class _Recorder:
    """A product that keeps some of the rows it is given."""

    takes_fp8 = False

    def __init__(self, product: Any) -> None:
        self.product = product
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor | Quantised) -> Tensor:
        assert isinstance(x, Tensor)
        self.kept.append(x[torch.randperm(len(x))[: ROWS // 8]].detach().float().cpu())
        return self.product(x)

    def rows(self) -> Tensor:
        every = torch.cat(self.kept)
        return every[torch.linspace(0, len(every) - 1, min(ROWS, len(every))).long()]


def collect(model: Path, text: str | None) -> dict[str, Tensor]:
    """By the name of each weight, over a text, or over what the model says by itself where there is none."""
    blocks = 2 * _TEXTS_AT_ONCE * _WINDOW // BLOCK_SIZE
    options: dict[str, Any] = {"dtype": "fp32", "prefix_caching": False, "num_blocks": blocks}
    options["max_num_seqs"] = _TEXTS_AT_ONCE
    with LLM(model, progress=False, **options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, TorchRunner)
        recorders = dict(_record(runner.model))
        _run(llm, text, runner.model.place.spec.bos_token_id)
    return {name: recorder.rows() for name, recorder in recorders.items() if recorder.kept}


def _run(llm: LLM, text: str | None, first: int | None) -> None:
    if text is None:
        own = SamplingParams(temperature=1.0, max_tokens=_WINDOW - 2, seed=0)
        llm.generate([[first or 0, token] for token in range(_TEXTS_AT_ONCE)], own)
        return
    tokens = llm.tokenizer.encode(text) if llm.tokenizer is not None else []
    windows = [tokens[start : start + _WINDOW - 1] for start in range(0, len(tokens), _WINDOW - 1)]
    if not windows:
        raise ConfigError("bad_text", "The calibration text has no tokens.", "Give a longer text.")
    spread = windows[:: max(1, len(windows) // 64)]
    llm.generate(spread, SamplingParams(temperature=0, max_tokens=1))


def _record(model: Decoder) -> Iterator[tuple[str, _Recorder]]:
    for layer in model.layers:
        parts = [*vars(layer.mixer).values(), *(vars(layer.ffn).values() if isinstance(layer.ffn, Mlp) else ())]
        for linear in parts:
            if not isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                continue
            recorder = _Recorder(linear.product)
            linear.product = recorder  # type: ignore[assignment]
            names = linear.names if isinstance(linear, ColumnParallelLinear) else [linear.name]
            yield from ((f"{name}.weight", recorder) for name in names)
