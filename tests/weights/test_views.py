"""However a checkpoint keeps its tensors, the model's own come out of it, and what does not belong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from phalanx.engine.sampling import SamplingParams
from phalanx.errors import CheckpointError
from phalanx.models import read_config
from phalanx.spec import Layout
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import check_tensors
from tests.conftest import FAMILIES, Reference, tiny_config
from tests.threaded_ranks import ThreadedEngine

References = Callable[[str], Reference]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def rewritten(reference: Reference, folder: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """The checkpoint with other tensors, or another config.json."""
    tensors = load_file(reference.folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    told = json.loads((reference.folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def answers(folder: Path, reference: Reference, tp: int = 1) -> bool:
    engine = ThreadedEngine(folder, tp)
    (request,) = engine.generate(reference.prompts[3:4], GREEDY)
    engine.close()
    return reference.confirms(reference.prompts[3], request.output)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_element_belongs_to_one_rank_or_to_all_that_share_it(family: str, tp: int) -> None:
    spec = read_config(json.loads(tiny_config(family).to_json_string()))
    layout = Layout(spec, tp)
    for tensor in spec.tensors.values():
        owners = torch.zeros(tensor.shape, dtype=torch.int32)
        for rank in range(tp):
            owners[layout.slices(tensor, rank)] += 1
        if tensor.split is None:
            assert (owners == tp).all()
        elif tensor.split == "kv":
            assert owners.min() >= 1
            assert owners.sum() == owners.numel() * max(1, tp / spec.kv_heads)
        else:
            assert (owners == 1).all()


def test_a_language_model_inside_one_with_eyes_is_found(references: References, tmp_path: Path) -> None:
    reference = references("llama4_text")

    def wrap(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_model.patch.weight"] = torch.zeros(2, 2)

    assert answers(rewritten(reference, tmp_path, wrap), reference, tp=2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model with random experts in MXFP4, and the same as transformers widens them."""
    reference = Reference("gpt_oss", tmp_path_factory.mktemp("wide"))
    wide, random = load_file(reference.folder / "model.safetensors"), torch.Generator().manual_seed(0)

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(121, 124, blocks.shape[:-1], generator=random, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)

    told = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    reference.folder = rewritten(reference, tmp_path_factory.mktemp("packed"), pack, quantization_config=told)
    reference.model.load_state_dict(wide, strict=False)
    return reference


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_experts_in_mxfp4_are_widened_as_transformers_widens_them(packed: Reference, tp: int) -> None:
    """Three blocks of 32 inner columns: at TP 2 one rank has two of them."""
    assert answers(packed.folder, packed, tp)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"), "missing_tensor", "layers.2.mlp.up_proj"),
        (lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.ones(2)}), "unknown_tensor", "1.extra"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), "misshapen_tensor", "model.norm"),
    ],
)
def test_a_tensor_too_few_too_many_or_misshapen_is_refused_by_name(
    references: References, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], code: str, named: str
) -> None:
    checkpoint = Checkpoint(rewritten(references("llama"), tmp_path, change))
    reader = checkpoint.open_reader(torch.device("cpu"))
    with pytest.raises(CheckpointError) as refused:
        check_tensors(Layout(checkpoint.spec, 1), reader)
    reader.close()
    assert refused.value.code == code
    assert named in refused.value.found
