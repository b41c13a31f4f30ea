"""Adapters: what a request is answered by is the model with its own adapter merged, whoever shares the batch."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx import LLM, SamplingParams
from phalanx.errors import AdapterError
from phalanx.models.adapter import read_adapter
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import LOGIT_NOISE, Reference
from tests.lora import merged, write_adapter
from tests.threaded_ranks import ThreadedEngine

ALONE = SamplingParams(max_tokens=0, prompt_logprobs=0)
ROOM = 2**24


def confirm(model: Any, prompt: list[int], request: Any) -> None:
    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    expected = [float(scores[at - 1, token]) for at, token in enumerate(prompt) if at]
    assert [each.sampled for each in request.prompt_logprobs] == pytest.approx(expected, abs=4 * LOGIT_NOISE)


def confirm_all(
    engine: ThreadedEngine, models: dict[str | None, Any], prompts: list[list[int]], names: list[str | None]
) -> None:
    """Each prompt's log-probabilities and greedy answer are those of its own model."""
    for prompt, name, request in zip(prompts, names, engine.generate(prompts, ALONE, names), strict=True):
        confirm(models[name], prompt, request)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for prompt, name, request in zip(prompts, names, engine.generate(prompts, greedy, names), strict=True):
        with torch.inference_mode():
            scores = models[name](torch.tensor([prompt + request.output[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = scores.gather(1, torch.tensor(request.output)[:, None])[:, 0]
        assert (scores.amax(-1) - chosen).max() <= 2 * LOGIT_NOISE


@pytest.mark.parametrize(("family", "tp"), [("llama3_rope", 1), ("llama", 2), ("llama3_rope", 3)])
def test_each_row_is_answered_by_its_own_adapter(
    references: Callable[[str], Reference], tmp_path: Path, family: str, tp: int
) -> None:
    """Three models in one batch: none, one of all projections, one of a few, and ranks that share heads unevenly."""
    reference = references(family)
    folders = {
        "all": write_adapter(reference.model, tmp_path / "all", 5),
        "few": write_adapter(reference.model, tmp_path / "few", 3, ("v_proj", "down_proj"), use_rslora=True),
    }
    models = {None: reference.model} | {name: merged(reference.model, folder) for name, folder in folders.items()}
    engine = ThreadedEngine(reference.folder, tp=tp, num_blocks=64, lora_memory=ROOM)
    for name, folder in folders.items():
        engine.engine.load_adapter(name, folder)
    prompts = [prompt for prompt in reference.prompts if len(prompt) > 1]
    names = [(None, "all", "few")[index % 3] for index in range(len(prompts))]
    confirm_all(engine, models, prompts, names)
    engine.close()


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
FLAT_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
KEPT_OTHERWISE = {
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ("qkv_proj",)),
    "qwen3_5_text": ((*ATTENTION, *FLAT_DELTA, "gate_proj", "up_proj", "down_proj"), ("q_proj", "in_proj_qkv")),
    "qwen3_next": ((*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"), ("in_proj_ba",)),
    "deepseek_v3": (LATENT, ("kv_a_proj_with_mqa",)),
    "kimi_like": (("q_proj", *LATENT[2:]), ("q_proj",)),
    "glm_moe_dsa": (LATENT, ("q_a_proj",)),
    "llama4_text": (ATTENTION, ("k_proj",)),
}


@pytest.mark.parametrize(("family", "tp"), [("phi3", 1), ("qwen3_next", 1), *((name, 3) for name in KEPT_OTHERWISE)])
def test_matrices_are_adapted_as_checkpoints_keep_them(
    references: Callable[[str], Reference], tmp_path: Path, family: str, tp: int
) -> None:
    """Several as one: Phi-3's q, k and v, and its gate and up; the query and the gate of Qwen3.5's attention, head by
    head; what enters delta nets. Rotary pairs side by side: latent attention, with an indexer or without, and Llama 4.
    """
    reference = references(family)
    every, few = KEPT_OTHERWISE[family]
    folders = {
        "all": write_adapter(reference.model, tmp_path / "all", 5, every),
        "few": write_adapter(reference.model, tmp_path / "few", 3, few),
    }
    engine = ThreadedEngine(reference.folder, tp=tp, num_blocks=64, lora_memory=ROOM)
    for name, folder in folders.items():
        engine.engine.load_adapter(name, folder)
    prompts = [prompt for prompt in reference.prompts if len(prompt) > 1][:4]
    names: list[str | None] = ["all", "few", None, "all"]
    models = {None: reference.model} | {name: merged(reference.model, folder) for name, folder in folders.items()}
    confirm_all(engine, models, prompts, names)
    engine.close()


def test_a_prefix_is_cached_for_its_adapter_alone(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """One prompt by the model, by an adapter, and by another one that has come to the same name."""
    reference = references("llama")
    prompt, asked = reference.prompts[4], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine = ThreadedEngine(reference.folder, num_blocks=64, lora_memory=ROOM)

    def cached(name: str | None) -> int:
        (request,) = engine.generate([prompt], asked, [name])
        return request.cached_tokens

    assert (cached(None), cached(None)) == (0, 80)
    for number in (1, 2):
        engine.engine.load_adapter("one", write_adapter(reference.model, tmp_path / str(number), 4))
        assert (cached("one"), cached("one")) == (0, 80)
        engine.engine.unload_adapter("one")
    assert cached(None) == 80
    engine.close()


def test_an_adapter_stays_until_its_last_request_has_ended(
    references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("llama")
    core = ThreadedEngine(reference.folder, num_blocks=64, lora_memory=ROOM)
    engine, folder = core.engine, write_adapter(reference.model, tmp_path / "one", 4)
    engine.load_adapter("one", folder)
    request = engine.add(reference.prompts[3], ALONE, adapter="one")
    engine.step()
    engine.unload_adapter("one")
    with pytest.raises(AdapterError, match="None is loaded"):
        engine.add([1], ALONE, adapter="one")
    while engine.has_work:
        engine.step()
    confirm(merged(reference.model, folder), reference.prompts[3], request)
    (model,) = (rank.model for rank in core.engine.runner.ranks)  # type: ignore[attr-defined]
    engine.add([1, 2], ALONE)
    engine.step()
    assert not any(linear.adapters for linear in model.linears())
    core.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_llm_takes_adapters_at_its_start_and_later(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """Over processes; without room there is none."""
    reference = references("llama")
    first, second = (write_adapter(reference.model, tmp_path / name, 4) for name in ("first", "second"))
    prompt, limits = reference.prompts[3], {"num_blocks": 64, "max_model_len": 128}
    with LLM(reference.folder, tp=2, progress=False, lora={"first": str(first)}, **limits) as llm:
        told = llm.generate(prompt, ALONE, adapter="first").prompt_logprobs
        with torch.inference_mode():
            scores = torch.log_softmax(merged(reference.model, first)(torch.tensor([prompt])).logits[0], -1)
        expected = [float(scores[at - 1, token]) for at, token in enumerate(prompt) if at]
        assert [each.sampled for each in told or [] if each] == pytest.approx(expected, abs=4 * LOGIT_NOISE)
        with pytest.raises(AdapterError, match="--lora-memory"):
            llm.load_adapter("second", second)
        llm.unload_adapter("first")
        llm.load_adapter("second", second)
        assert llm.generate(prompt, ALONE, adapter="second").prompt_logprobs != told


def change(folder: Path, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def retensor(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def reheader(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another header before the same data."""
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])


def instead(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another rank": (lambda folder: change(folder, r=7), "rank is 7"),
    "another base": (
        lambda folder: retensor(folder, lambda tensors: tensors.update({A: torch.zeros(4, 999)})),
        "made for some/model",
    ),
    "a part is missing": (
        lambda folder: retensor(folder, lambda tensors: tensors.pop(A)),
        "no lora_A for model",
    ),
    "a target without tensors": (lambda folder: change(folder, target_modules=["q_proj", "up_proj"]), "'up_proj'"),
    "a module that is not there": (
        lambda folder: retensor(
            folder, lambda tensors: tensors.update({A.replace("q_proj", "x_proj"): tensors[A].clone()})
        ),
        "x_proj, which this model has not",
    ),
    "the embedding": (
        lambda folder: retensor(
            folder,
            lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_A.weight": tensors[A].clone()}),
        ),
        "embed_tokens",
    ),
    "no LoRA": (lambda folder: change(folder, peft_type="IA3"), "'IA3'"),
    "DoRA": (lambda folder: change(folder, use_dora=True), "use_dora"),
    "trained biases": (lambda folder: change(folder, bias="all"), "bias = 'all'"),
    "whole modules": (lambda folder: change(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "no rank": (lambda folder: change(folder, r=0), "r is 0"),
    "half a file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(
            (folder / "adapter_model.safetensors").read_bytes()[:-5]
        ),
        "damaged",
    ),
    "tensors that lie over each other": (
        lambda folder: reheader(
            folder, lambda header: header[A].update(data_offsets=[0, header[A]["data_offsets"][1]])
        ),
        "damaged",
    ),
    "other numbers": (lambda folder: reheader(folder, lambda header: header[A].update(dtype="I32")), "I32"),
    "a header without end": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(
            (200_000).to_bytes(8, "little") + b"[" * 200_000
        ),
        "damaged",
    ),
    "a configuration without end": (lambda folder: nested(folder / "adapter_config.json"), "RecursionError"),
    "a pipe for a configuration": (lambda folder: instead(folder / "adapter_config.json", os.mkfifo), "NotFound"),
    "a device for tensors": (
        lambda folder: instead(folder / "adapter_model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "safetensors",
    ),
    "no file": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors"),
    "no folder": (shutil.rmtree, "adapter_config.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_added_is_refused_by_name(
    references: Callable[[str], Reference], tmp_path: Path, name: str
) -> None:
    reference, (spoil, told) = references("llama"), WRONG[name]
    folder = write_adapter(
        reference.model, tmp_path / "one", 4, ("q_proj", "down_proj"), base_model_name_or_path="some/model"
    )
    spec = Checkpoint(reference.folder).spec
    read_adapter(folder, spec)
    spoil(folder)
    with pytest.raises(AdapterError, match=told):
        read_adapter(folder, spec)


def test_no_rank_holds_more_than_is_counted(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """Four matrices are one product of delta nets, no more anywhere."""
    reference = references("qwen3_next")
    folder = write_adapter(reference.model, tmp_path / "one", 4, ("in_proj_qkvz",))
    core = ThreadedEngine(reference.folder, num_blocks=64, lora_memory=ROOM)
    core.engine.load_adapter("one", folder)
    core.generate([[1, 2]], ALONE)
    (model,) = (rank.model for rank in core.engine.runner.ranks)  # type: ignore[attr-defined]
    held = [part.numel() for linear in model.linears() for added in linear.adapters.values() for part in added]
    spec = Checkpoint(reference.folder).spec
    assert 0 < 4 * sum(held) <= read_adapter(folder, spec).rank_bytes(spec)
    core.close()


def test_the_widening_of_latents_is_refused_by_name(references: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = references("deepseek_v3")
    folder = write_adapter(reference.model, tmp_path / "one", 4, ("kv_b_proj",))
    with pytest.raises(AdapterError, match=r"layers.0.self_attn.kv_b_proj, which is held.* kv_a_proj_with_mqa, o_proj"):
        read_adapter(folder, Checkpoint(reference.folder).spec)


def test_experts_are_refused_by_name(references: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = references("qwen3_moe")
    folder = write_adapter(reference.model, tmp_path / "one", 4, ("q_proj",))
    spec = Checkpoint(reference.folder).spec
    read_adapter(folder, spec)
    experts = A.replace("layers.0.self_attn.q_proj", "layers.0.mlp.experts.0.gate_proj")
    retensor(folder, lambda tensors: tensors.update({experts: tensors[A].clone()}))
    with pytest.raises(AdapterError, match=r"layers.0.mlp.experts.0.gate_proj.* not experts"):
        read_adapter(folder, spec)


def test_it_is_what_peft_computes(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """An adapter that PEFT itself has written, merged by PEFT itself."""
    peft = pytest.importorskip("peft")
    reference = references("llama3_rope")
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(reference.model), config)
    adapted.save_pretrained(tmp_path)
    whole = adapted.merge_and_unload().eval()
    engine = ThreadedEngine(reference.folder, tp=2, num_blocks=64, lora_memory=ROOM)
    engine.engine.load_adapter("peft", tmp_path)
    (request,) = engine.generate([reference.prompts[4]], ALONE, ["peft"])
    confirm(whole, reference.prompts[4], request)
    engine.close()
