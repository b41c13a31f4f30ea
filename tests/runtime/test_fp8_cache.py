"""Keys and values kept in FP8: held to transformers with a cache that rounds by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from phalanx import LLM, SamplingParams
from phalanx.engine.step_plan import Admission, StepPlan
from phalanx.errors import CheckpointError, ConfigError
from phalanx.fabric.group import Solo
from phalanx.runtime import rank
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Sizes, blocks_that_fit, load_model, make_runner
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import LOGIT_NOISE, make_checkpoint

HALFWAY = 1e-4
"""Far above the last bits of a key or value, far below a step of the format for most of them."""
FAMILIES = ("llama", "qwen2", "qwen3")
LAYERS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}
SCALES = [(0.05 * (layer + 1), 0.7 / (layer + 1)) for layer in range(LAYERS)]
NAMES = (
    "self_attn.{}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{}_proj.output_scale",
)


Held = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer as an engine holds them in FP8, by token, widened and scaled."""


class RoundingCache(DynamicCache):
    """What transformers caches, and so attends to, went through e4m3.

    Where a number lies halfway between two of the format, its last bits decide, and they are each processor's own. A
    number that was rounded the other way moves all that follows. So there, and only there, it is rounded as `held` is.
    """

    def __init__(self, scales: list[tuple[float, float]], held: Held | None = None) -> None:
        super().__init__()
        self._scales = scales
        self._held = held

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **rest: Any) -> Any:
        rounded = []
        for part, (states, scale) in enumerate(zip((key_states, value_states), self._scales[layer_idx], strict=True)):
            found = (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(states.dtype) * scale
            if self._held is not None:
                other = self._held[layer_idx][part].transpose(0, 1)[None]
                halfway = (other - states).abs() <= (found - states).abs() + HALFWAY
                found = torch.where(halfway, other, found)
            rounded.append(found)
        return super().update(*rounded, layer_idx, *more, **rest)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, made)
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", made)
    return made


def with_scales(folder: Path, target: Path, name: str, scales: list[tuple[float, float]] = SCALES) -> Path:
    """The same checkpoint with scales beside its weights."""
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    tensors = {
        f"model.layers.{layer}." + name.format(letter): torch.tensor([value] if layer % 2 else value)
        for layer, pair in enumerate(scales)
        for letter, value in zip("kv", pair, strict=True)
    }
    save_file(tensors, target / "scales.safetensors")
    return target


def some_prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(vocab) for _ in range(length)] for length in (1, 5, 17, 48, 83)]


def logits(folder: Path, prompt: list[int], chunks: list[int]) -> tuple[Tensor, Held]:
    """At every position of a prompt that is computed in these chunks, and the cache behind it."""
    config = EngineConfig(max_num_seqs=4, kv_cache_dtype="fp8")
    model = load_model(config, Checkpoint(folder), Solo(), progress=lambda done, total: None)
    runner = make_runner(config, model, Sizes(num_blocks=64, max_model_len=256))
    rows, start = [], 0
    for step, count in enumerate(chunks, 1):
        admissions = [Admission(0, len(prompt), prompt, 0, SamplingParams())] if start == 0 else []
        blocks = [(0, list(range(10, 20)))] if start == 0 else []
        windows = [(0, 0, list(range(20, 30)))] if start == 0 and model.place.spec.window_groups else []
        plan = StepPlan(step, admissions, [0], [start], [count], [0], blocks, window_blocks=windows)
        with torch.inference_mode():
            inputs = runner.batch.prepare(plan)
            rows.append(model.scores(model(inputs.tokens, inputs.positions, inputs.attention)))
        start += count
    held = []
    for attention in (layer.mixer for layer in model.layers):
        first = 10 + 10 * attention.cache_group
        tokens = attention.cache[first : first + 10].float().flatten(0, 1)[: len(prompt)]
        held.append((tokens[:, 0] * attention.cache_scales.key, tokens[:, 1] * attention.cache_scales.value))
    return torch.cat(rows), held


def reference_logits(folder: Path, prompt: list[int], cache: DynamicCache) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0]


@pytest.mark.parametrize("scaled", [False, True])
def test_logits_are_those_of_transformers_with_a_rounding_cache(folder: Path, tmp_path: Path, scaled: bool) -> None:
    """However the prompt is cut, from its first token on."""
    prompt = some_prompts(500)[-1][:57]
    ours = with_scales(folder, tmp_path, NAMES[0]) if scaled else folder
    scales = SCALES if scaled else [(1.0, 1.0)] * LAYERS
    for chunks in ([57], [1, 20, 36]):
        found, held = logits(ours, prompt, chunks)
        wanted = reference_logits(folder, prompt, RoundingCache(scales, held))
        torch.testing.assert_close(found, wanted, atol=LOGIT_NOISE, rtol=0)
    unrounded = reference_logits(folder, prompt, DynamicCache())
    assert (wanted - unrounded).abs().median() > 100 * LOGIT_NOISE, "rounding shows"


def shortfall(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """How far behind the best each token of an answer is, by transformers with a rounding cache."""
    with torch.inference_mode():
        told = model(torch.tensor([prompt + answer]), past_key_values=RoundingCache(SCALES), use_cache=True)
    scores = told.logits[0, len(prompt) - 1 : -1]
    return scores.max(1).values - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_tokens_are_those_of_transformers_with_a_rounding_cache(llama: Path, tmp_path: Path, tp: int) -> None:
    """One batch under pressure: chunks of prompts, cached prefixes and preemption, then again from a warm cache.

    Where a last bit rounds a number up in one place and down in the other, logits move by less than a tenth.
    """
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with LLM(with_scales(llama, tmp_path, NAMES[1]), tp=tp, progress=False, kv_cache_dtype="fp8", **TIGHT) as llm:
        for _ in range(2):
            answers = llm.generate(some_prompts(512), GREEDY)
            told = zip(some_prompts(512), answers, strict=True)
            behind = torch.cat([shortfall(model, prompt, answer.token_ids) for prompt, answer in told])
            assert behind.max() < 0.1
            assert (behind > 0).float().mean() < 0.05
        assert answers[-1].cached_tokens == 80


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_found_under_each_of_their_names(llama: Path, tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(with_scales(llama, tmp_path, name))
    for dtype, wanted in {"fp8": SCALES, "auto": [(1.0, 1.0)] * LAYERS}.items():
        model = load_model(EngineConfig(kv_cache_dtype=dtype), checkpoint, Solo(), lambda done, total: None)
        assert [layer.mixer.cache_scales for layer in model.layers] == [pytest.approx(pair) for pair in wanted]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), [0.1, 0.2, 0.3]])
def test_a_scale_that_is_not_one_number_above_zero_is_refused(
    llama: Path, tmp_path: Path, bad: float | list[float]
) -> None:
    checkpoint = Checkpoint(with_scales(llama, tmp_path, NAMES[0]))
    save_file({"model.layers.2.self_attn.v_scale": torch.tensor(bad)}, tmp_path / "scales.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.v_scale should be one number above 0"):
        load_model(EngineConfig(kv_cache_dtype="fp8"), checkpoint, Solo(), lambda done, total: None)


def test_twice_the_tokens_of_bf16_fit_into_the_same_memory(llama: Path) -> None:
    fitting, taken = {}, {}
    for dtype in ("auto", "fp8"):
        config = EngineConfig(dtype="bf16", kv_cache_dtype=dtype, kv_cache_memory=60 * 12288)
        model = load_model(config, Checkpoint(llama), Solo(), lambda done, total: None)
        fitting[dtype] = blocks_that_fit(config, model)
        make_runner(config, model, Sizes(fitting[dtype], max_model_len=64))
        block = model.layers[0].mixer.cache[0].nbytes
        taken[dtype] = sum(layer.mixer.cache.nbytes - block for layer in model.layers)
    assert fitting["fp8"] == 2 * fitting["auto"] == 120
    assert taken["fp8"] == taken["auto"] == 60 * 12288


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int3'") as told:
        EngineConfig(kv_cache_dtype="int3")
    assert told.value.fix == "Use one of auto, fp8."


def test_a_gpu_without_fp8_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "pick_device", lambda config, gpu: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"compute capability is 8\.6; e4m3 needs 8\.9") as told:
        load_model(EngineConfig(kv_cache_dtype="fp8"), Checkpoint(llama), Solo(), lambda done, total: None)
    assert told.value.fix == "Use kv_cache_dtype auto."
