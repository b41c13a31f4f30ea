"""Qwen3.5 and Qwen3-Next as the hub names them: inside a model with eyes, experts stacked or one by one, in FP8."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.engine.sampling import SamplingParams
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import FAMILIES, Reference
from tests.threaded_ranks import ThreadedEngine

References = Callable[[str], Reference]
Tensors = dict[str, Tensor]

pytestmark = pytest.mark.slow

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight")
CONVERTED = re.compile(r".*(\b[qkvo]|out|gate|up|down)_proj\.weight|.*in_proj_(qkv|qkvz|z)\.weight")
BLOCK = 128
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WIDE: dict[str, Any] = {
    "hidden_size": BLOCK,
    "head_dim": BLOCK,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": BLOCK,
    "linear_value_head_dim": BLOCK,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "moe_intermediate_size": 2 * BLOCK,
    "shared_expert_intermediate_size": BLOCK,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


def wrapped(reference: Reference, folder: Path, tensors: Tensors, **config: Any) -> Path:
    """As the hub keeps a language model that has eyes: another prefix, and what this runtime leaves alone."""
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    named |= {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    text = json.loads((reference.folder / "config.json").read_text())
    text |= {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    outer = {
        "model_type": text["model_type"].removesuffix("_text"),
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32},
        "image_token_id": 500,
    }
    (folder / "config.json").write_text(json.dumps(outer | config))
    return folder


def stack(tensors: Tensors) -> Tensors:
    """Experts as two stacks a layer, without .weight behind their names."""
    kept, experts = {}, dict[str, dict[str, list[Tensor]]]()
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            kept[name] = tensor
        else:
            experts.setdefault(found[1], {}).setdefault(found[3], []).append(tensor)
    for path, parts in experts.items():
        assert len({len(each) for each in parts.values()}) == 1
        gate, up, down = (torch.stack(parts[part]) for part in ("gate", "up", "down"))
        kept |= {f"{path}.gate_up_proj": torch.cat((gate, up), 1), f"{path}.down_proj": down}
    return kept


def tokens(folder: Path, prompt: list[int], tp: int) -> list[int]:
    engine = ThreadedEngine(folder, tp)
    (request,) = engine.generate([prompt], GREEDY)
    engine.close()
    return list(request.output)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(
    ("family", "stacked"), [("qwen3_5_text", False), ("qwen3_5_moe_text", False), ("qwen3_5_moe_text", True)]
)
def test_the_hub_s_names_give_the_tokens_of_transformers(
    references: References, tmp_path: Path, family: str, stacked: bool, tp: int
) -> None:
    reference = references(family)
    tensors = load_file(reference.folder / "model.safetensors")
    folder = wrapped(reference, tmp_path, stack(tensors) if stacked else tensors)
    assert reference.confirms(reference.prompts[3], tokens(folder, reference.prompts[3], tp))


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe_text"])
def in_fp8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model in blocks of FP8, expert by expert, and what transformers makes of the same weights made wide again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, request.param, WIDE)
        reference = Reference(request.param, tmp_path_factory.mktemp("wide"))
    stored: Tensors = {}
    for name, tensor in load_file(reference.folder / "model.safetensors").items():
        stored[name] = tensor
        if CONVERTED.fullmatch(name):
            tiles = tensor.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scales = tiles.abs().amax((1, 3)) / 448
            stored[name] = (tiles / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
    narrow = {name: tensor for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn}
    assert any("in_proj_qkv" in name for name in narrow)
    wide = {
        name: (tensor.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)))
        .mul(stored[f"{name}_scale_inv"][:, None, :, None])
        .flatten(2, 3)
        .flatten(0, 1)
        for name, tensor in narrow.items()
    }
    known = reference.model.state_dict()
    for name, tensor in (stack(load_file(reference.folder / "model.safetensors") | wide)).items():
        known[name].copy_(tensor)
    told = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    folder = tmp_path_factory.mktemp("fp8")
    if request.param == "qwen3_next":
        save_file(stored, folder / "model.safetensors")
        config = json.loads((reference.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    else:
        wrapped(reference, folder, stored, quantization_config=told)
    reference.folder = folder
    return reference


@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_blocks_are_those_of_the_checkpoint(in_fp8: Reference, tp: int) -> None:
    assert Checkpoint(in_fp8.folder).spec.number_format == "fp8"
    output = tokens(in_fp8.folder, in_fp8.prompts[3], tp)
    assert in_fp8.confirms(in_fp8.prompts[3], output)
