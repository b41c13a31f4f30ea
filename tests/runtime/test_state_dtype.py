"""Recurrent states in 16 bits: half the memory, nearly the same answers, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.bench.offline import least_work
from phalanx.engine.sampling import SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.errors import ConfigError
from phalanx.fabric.group import Solo
from phalanx.layers.decoder import Decoder
from phalanx.llm import LLM
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import held_weights
from phalanx.runtime.rank import Sizes, load_model, make_runner
from phalanx.runtime.speculate import open_checkpoint, settle
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import Reference

References = Callable[[str], Reference]

USUAL, MOST = 0.03, 0.16
"""How far logits of the tiny models, of some 2, are from those with states in float32: most of them, and of a model
without experts all. Twice what was seen. A token that another expert gets may be anything.
"""
TIGHT = {"num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def loaded(folder: Path, **asked: str) -> tuple[EngineConfig, Decoder]:
    config = EngineConfig(max_num_seqs=3, **asked)
    return config, load_model(config, open_checkpoint(config, folder), Solo(), lambda done, total: None)


def logits(folder: Path, tokens: list[int], prompt: int) -> Tensor:
    """With states in bf16, at every position: the prompt at once, and token by token behind it."""
    config, model = loaded(folder, state_dtype="bf16")
    runner, rows = make_runner(config, model, Sizes(num_blocks=16, max_model_len=256)), []
    for start in (0, *range(prompt, len(tokens))):
        count = prompt if start == 0 else 1
        admissions = [] if start else [Admission(0, len(tokens), tokens, 0, SamplingParams())]
        blocks = [] if start else [(0, list(range(16)))]
        with torch.inference_mode():
            inputs = runner.batch.prepare(StepPlan(1 + start, admissions, [0], [start], [count], [0], blocks))
            rows.append(model.scores(model(inputs.tokens, inputs.positions, inputs.attention)))
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_logits_are_those_of_transformers_but_for_rounding(references: References, name: str) -> None:
    """A prompt reads nothing that was rounded."""
    reference = references(name)
    tokens = reference.prompts[4] + reference.prompts[3]
    apart = (logits(reference.folder, tokens, 40) - reference.scores(tokens)).abs()
    assert apart[:40].max() < 1e-3
    assert 1e-3 < apart[40:].median() < USUAL
    assert name == "qwen3_next" or apart.max() < MOST


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("tp", "speculate"), [(1, "ngram"), (2, "off")])
def test_answers_are_the_likeliest_but_for_rounding(references: References, tp: int, speculate: str) -> None:
    """By transformers. In chunks, with preemption and cached prefixes, then again from a warm cache."""
    reference = references("qwen3_5_text")
    options = {"state_dtype": "bf16", "speculate": speculate, **TIGHT}
    with LLM(reference.folder, tp=tp, progress=False, **options) as llm:
        for _ in range(2):
            answers, behind = llm.generate(reference.prompts, GREEDY), []
            for prompt, answer in zip(reference.prompts, answers, strict=True):
                scores = reference.scores(prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
                behind.append(scores.amax(-1) - scores.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0])
            assert torch.cat(behind).max() < 2 * MOST
            assert (torch.cat(behind) > 0).float().mean() < 0.1
        assert any(answer.cached_tokens for answer in answers)


def test_states_are_halved_and_nothing_else(references: References) -> None:
    folder = references("qwen3_5_text").folder
    models = [loaded(folder, state_dtype=asked)[1] for asked in ("auto", "bf16")]
    wide, narrow = ([layer.mixer for layer in model.layers if layer.mixer.states()] for model in models)
    for mixer, other in zip(wide, narrow, strict=True):
        assert (mixer.memory.dtype, other.memory.dtype) == (torch.float32, torch.bfloat16)
        assert mixer.columns.dtype == other.columns.dtype == torch.float32
        assert {part.dtype for part in other.pending[:2]} == {torch.float32, torch.int32}
    numbers = sum(mixer.memory.shape[1:].numel() for mixer in wide)
    counted = [sum(cache.state_bytes for cache in model.place.spec.caches) for model in models]
    assert counted[0] - counted[1] == 2 * numbers


def test_a_machine_is_held_against_the_bytes_of_its_states(references: References) -> None:
    source, cpu = Checkpoint(references("qwen3_5_text").folder), torch.device("cpu")
    configs = [EngineConfig(state_dtype=asked) for asked in ("fp32", "bf16")]
    wide, narrow = (least_work(source.spec, held_weights(each, source, cpu), each, cpu) for each in configs)
    assert narrow.state_bytes < wide.state_bytes
    assert dataclasses.replace(narrow, state_bytes=wide.state_bytes) == wide


def test_without_a_word_states_are_as_they_were(references: References) -> None:
    folder = references("qwen3_next").folder
    for asked in ({}, {"state_dtype": "fp32"}, {"dtype": "bf16"}):
        nets = [layer.mixer for layer in loaded(folder, **asked)[1].layers if layer.mixer.states()]
        assert nets
        assert all(net.memory.dtype == torch.float32 and net.pending is None for net in nets)


def test_dtypes_go_by_all_their_names() -> None:
    for asked, kept in (("bfloat16", "bf16"), (torch.float32, "fp32"), ("float", "fp32"), ("auto", "auto")):
        assert EngineConfig(state_dtype=asked).state_dtype == kept  # type: ignore[arg-type]
    for asked in ("fp16", "int3"):
        with pytest.raises(ConfigError, match="state_dtype is") as told:
            EngineConfig(state_dtype=asked)
        assert told.value.fix == "Use one of auto, fp32, bf16, float32, float, bfloat16."


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_a_model_without_states_is_told_so(references: References, tiny_llama: Path, asked: str) -> None:
    """Rings of compressed attention are no such states."""
    for folder in (tiny_llama, references("deepseek_v4").folder):
        settle(EngineConfig(), folder)
        with pytest.raises(ConfigError, match="has no recurrent states") as told:
            settle(EngineConfig(state_dtype=asked), folder)
        assert told.value.code == "no_states"
