"""`phalanx quantize` where matrices lie fused, experts in stacks, norms less one, or there is what is not read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.errors import CheckpointError
from phalanx.llm import LLM
from phalanx.quant import at_work
from phalanx.weights.balance import balanced
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.quantize import quantize
from phalanx.weights.reader import SafetensorsReader
from phalanx.weights.rewriting import rewritten
from phalanx.weights.targets import target_of
from phalanx.weights.views import ViewReader
from tests.conftest import Reference, fill_randomly, tiny_config
from tests.heads import HeadReference
from tests.weights.test_quantize import silent

pytestmark = pytest.mark.slow

DELTA_NET = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_value_heads": 8, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": 3}
SIZES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "gemma3_text": {"num_key_value_heads": 8, "head_dim": 32},
    "qwen3_next": DELTA_NET | EXPERTS,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | EXPERTS,
    "llama4_text": {"num_local_experts": 3, "intermediate_size": 64, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32},
    "glm4_moe": {"moe_intermediate_size": 64},
}


def sizes(name: str) -> dict[str, Any]:
    common = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "mlp_only_layers": []}
    types = {"qwen3": ["linear_attention", "full_attention"], "gemma3": ["sliding_attention", "full_attention"]}
    found = next(({"layer_types": types[start]} for start in types if name.startswith(start)), {})
    return common | found | SIZES[name]


def made(name: str, folder: Path, **changes: Any) -> Path:
    """As transformers writes it."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **sizes(name) | changes))
    fill_randomly(model)
    model.save_pretrained(folder)
    return folder


def whole(tensor: Any) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape)


def check_alone(source: Path, output: Path, number_format: str) -> None:
    """Each matrix as it would be if it were by itself, all else as it was."""
    before, after = Checkpoint(source), Checkpoint(output)
    target = target_of(number_format, before.spec, [])
    with (
        closing(before.open_reader(torch.device("cpu"))) as old,
        closing(after.open_reader(torch.device("cpu"))) as new,
    ):
        for tensor in before.spec.tensors.values():
            values, scheme = old.read(tensor.name, whole(tensor)).contiguous(), new.scheme_of(tensor.name)
            assert (scheme is not None) == tensor.is_linear, tensor.name
            if scheme is None:
                assert torch.equal(new.read(tensor.name, whole(tensor)), values), tensor.name
            else:
                found = at_work(scheme).widen(new.read_pieces(tensor.name, whole(tensor)), whole(tensor))
                alone = at_work(target.scheme).widen(target.quantise(values), whole(tensor))
                assert torch.equal(found, alone), tensor.name


@pytest.mark.parametrize("number_format", ["fp8-channel", "w4a16", "mxfp4", "awq"])
@pytest.mark.parametrize("name", SIZES)
def test_every_matrix_is_what_it_would_be_alone(tmp_path: Path, name: str, number_format: str) -> None:
    source, output = made(name, tmp_path / "plain"), tmp_path / "quantised"
    quantize(source, output, number_format, silent)
    check_alone(source, output, number_format)


def test_blocks_of_what_lies_fused_are_those_of_each_where_none_is_cut(tmp_path: Path) -> None:
    aligned = {"linear_key_head_dim": 32, "head_dim": 128}
    source, output = made("qwen3_5_text", tmp_path / "plain", **aligned), tmp_path / "quantised"
    quantize(source, output, "fp8-block", silent)
    check_alone(source, output, "fp8-block")


def test_experts_in_stacks_under_another_name_are_written_one_by_one(tmp_path: Path) -> None:
    """As Qwen3.5 is on the hub, where a model of images has the one of text within."""
    source, output = made("qwen3_5_moe_text", tmp_path / "plain"), tmp_path / "quantised"
    tensors = load_file(source / "model.safetensors")
    experts = [key for key in tensors if ".experts.0.gate_proj" in key]
    for first in experts:
        gates, ups, downs = (
            torch.stack([tensors.pop(first.replace(".0.gate", f".{number}.{part}")) for number in range(3)])
            for part in ("gate", "up", "down")
        )
        path = first.partition("0.gate")[0]
        tensors |= {f"{path}gate_up_proj": torch.cat((gates, ups), 1), f"{path}down_proj": downs}
    named = {f"model.language_model.{key.removeprefix('model.')}": values for key, values in tensors.items()}
    named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    save_file(named, source / "model.safetensors")
    quantize(source, output, "w4a16", silent)
    assert "model.language_model.layers.1.mlp.experts.2.gate_proj.weight_packed" in SafetensorsReader(output).names()
    check_alone(source, output, "w4a16")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["phi3", "qwen3_5_moe_text"])
def test_ranks_serve_what_was_written(tmp_path: Path, name: str) -> None:
    quantize(made(name, tmp_path / "plain"), tmp_path / "quantised", "w4a16", silent)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    answers = []
    for tp in (1, 2):
        with LLM(tmp_path / "quantised", tp=tp, dtype="fp32", progress=False) as llm:
            answers.append(llm.generate([5, 9, 33, 7, 12, 60, 3], params).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["phi3", "gemma3_text"])
def test_transformers_loads_it(tmp_path: Path, name: str) -> None:
    source, output = made(name, tmp_path / "plain", dtype="bfloat16"), tmp_path / "quantised"
    quantize(source, output, "w4a16", silent)
    reference = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    prompt = [5, 9, 33, 7, 12, 60, 3]
    with torch.no_grad():
        theirs = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with LLM(output, dtype="fp32", progress=False) as llm:
        answer = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=20))
    assert answer.logprobs is not None
    assert max(abs(float(theirs[token]) - score) for token, score in answer.logprobs[0].top) < 0.02


@pytest.mark.parametrize("name", ["phi3", "gemma3_text"])
def test_factors_change_nothing_but_the_rounding(tmp_path: Path, name: str) -> None:
    """Written with factors and not rounded, the model computes what it did."""
    source = made(name, tmp_path / "plain", num_key_value_heads=8)
    spec, plain = Checkpoint(source).spec, tmp_path / "balanced"
    inputs = {tensor.name: torch.randn(32, tensor.shape[1]) for tensor in spec.tensors.values() if tensor.is_linear}
    for rows in inputs.values():
        rows[:, ::5] *= 30
    with closing(ViewReader(SafetensorsReader(source), spec)) as reader:
        factors = balanced(spec, reader, inputs, 32)
        assert {key.split(".")[-2] for key in factors} >= {"v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}
        tensors: dict[str, Tensor] = {
            tensor.name: tensor.change(factors).apply(tensor.read(reader), tensor.plus).contiguous()
            for tensor in rewritten(spec, reader)
        }
    changed = [
        name for name, values in load_file(source / "model.safetensors").items() if not values.equal(tensors[name])
    ]
    assert len(changed) >= 2 * 6
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text((source / "config.json").read_text())
    scores = []
    for folder in (source, plain):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            scores.append(model(torch.tensor([[5, 9, 33, 7, 12, 60, 3]])).logits)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_what_is_not_read_stays_as_it_was(tmp_path: Path) -> None:
    """A head that drafts, and the images' part of a model that Phalanx serves for text."""
    source, output = made("qwen3_5_text", tmp_path / "plain"), tmp_path / "quantised"
    tensors = load_file(source / "model.safetensors")
    further = {
        "mtp.fc.weight": torch.randn(128, 256),
        "mtp.norm.weight": torch.randn(128),
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(96, 32),
    }
    save_file(tensors | further, source / "model.safetensors")
    quantize(source, output, "w4a16", silent)
    reader = SafetensorsReader(output)
    for name, values in further.items():
        assert torch.equal(reader.read(name, whole(values)), values)
    left = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "mtp.fc", "model.visual.blocks.0.attn.qkv", "model.layers.0.linear_attn.in_proj_b"} <= set(left)
    assert not {"model.embed_tokens", "mtp.norm", "model.layers.0.linear_attn.in_proj_qkv"} & set(left)
    assert Checkpoint(output).spec.number_format == "int4"


@pytest.mark.parametrize("number_format", ["fp8-channel", "w4a16", "awq"])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5_moe_text"])
def test_a_head_that_drafts_goes_on_drafting(tmp_path: Path, name: str, number_format: str) -> None:
    source, output = made(name, tmp_path / "plain"), tmp_path / "quantised"
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    reference = SimpleNamespace(name=name, model=model, folder=source)
    head = HeadReference(cast("Reference", reference), tmp_path / "with_head", **sizes(name))
    quantize(head.folder, output, number_format, silent)
    before, after = SafetensorsReader(head.folder), SafetensorsReader(output)
    further = [key for key in before.names() if key not in load_file(source / "model.safetensors")]
    assert len(further) > 10
    for key in further:
        shape = before.shape(key) or ()
        every = tuple(slice(0, size) for size in shape)
        assert torch.equal(after.read(key, every), before.read(key, every))
    assert Checkpoint(output).has_draft_head
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    answers = []
    for speculate in ("mtp", "off"):
        with LLM(output, dtype="fp32", progress=False, speculate=speculate) as llm:
            answers.append(llm.generate([5, 9, 33, 7, 12, 60, 3], params).token_ids)
    assert answers[0] == answers[1]


def test_scales_that_would_be_of_several_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight holds several matrices") as refused:
        quantize(made("phi3", tmp_path / "plain"), tmp_path / "new", "fp8-block", silent)
    assert "fp8-channel" in refused.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
