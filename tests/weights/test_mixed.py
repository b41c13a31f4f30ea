"""Checkpoints that are not quantised all alike, or keep quantised matrices together: every part is what it means."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx.errors import CheckpointError
from phalanx.kernels.gemm import Gemm
from phalanx.layers.ffn.experts import Experts
from phalanx.models import read_config
from phalanx.quant import at_work
from phalanx.spec import Layout
from phalanx.spec.tensors import Stored
from phalanx.spec.tensors import Tensor as TensorSpec
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import check_tensors
from phalanx.weights.views import ViewReader
from tests.conftest import tiny_config
from tests.weights.conftest import Config, Tensors, random_tensors, save_folder
from tests.weights.four_bit_files import FORMS
from tests.weights.test_formats import BASE, MODELS, check_parts, share, written

SHARED: Config = BASE | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 4,
    "head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 384,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
}
LLAMA4: Config = BASE | {
    "model_type": "llama4_text",
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 384,
    "intermediate_size_mlp": 384,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}


def left_out(
    config: Config, form: str, modules: list[str], leaves: Callable[[str], bool]
) -> tuple[Config, Tensors, Tensors]:
    """The checkpoint with further modules as they were before."""
    config, stored, meant = written(config, form)
    plain = random_tensors(read_config(config), seed=2)
    for name in [name for name in meant if leaves(name) and read_config(config).tensors[name].is_linear]:
        module = name.removesuffix("weight")
        stored = {key: part for key, part in stored.items() if not key.startswith(module)}
        stored[name] = meant[name] = plain[name]
    told = config["quantization_config"]
    if "dynamic" in told:
        told = told | {"dynamic": told["dynamic"] | {f"-:.*{module}": {} for module in modules}}
    else:
        key = next(key for key in ("modules_to_not_convert", "ignore", "exclude_modules") if key in told)
        told = told | {key: told[key] + modules}
    return config | {"quantization_config": told}, stored, meant


@pytest.mark.parametrize("form", ["awq 64", "gptq", "w4a16", "fp8 ue8m0", "modelopt nvfp4"])
@pytest.mark.parametrize("expert", [0, 1])
def test_an_expert_that_is_left_out_is_as_it_was(tmp_path: Path, form: str, expert: int) -> None:
    module = f"mlp.experts.{expert}"
    modules = [f"*.{module}.*" if form == "modelopt nvfp4" else f"re:.*{module}.*" if form == "w4a16" else module]
    config, stored, meant = left_out(
        MODELS["qwen3_moe"] | {"head_dim": 128}, form, modules, lambda name: module in name
    )
    check_parts(Checkpoint(save_folder(tmp_path, config, stored)), meant, form, quantised=True)


@pytest.mark.parametrize("form", ["awq 64", "w4a16", "fp8 ue8m0"])
@pytest.mark.parametrize("left", ["down_proj", "shared_experts.down_proj", "shared_experts", "mlp.experts"])
def test_a_shared_expert_need_not_be_kept_as_the_routed_ones(tmp_path: Path, form: str, left: str) -> None:
    modules = [f"re:.*{left}.*" if form == "w4a16" else left]
    config, stored, meant = left_out(SHARED | {"head_dim": 128}, form, modules, lambda name: left in name)
    checkpoint = Checkpoint(save_folder(tmp_path, config, stored))
    check_parts(checkpoint, meant, form, quantised=True)
    experts = share(checkpoint, 0, 1, quantised=True).layers[0].ffn
    assert isinstance(experts, Experts)
    assert experts.shared is not None
    for product in experts.shared.products():
        assert isinstance(product, Gemm) == isinstance(product.weight, torch.Tensor)


@pytest.mark.parametrize("form", ["w4a16", "fp8 ue8m0"])
def test_fused_experts_are_left_out_by_the_name_that_the_file_has(tmp_path: Path, form: str) -> None:
    config, stored, meant = written(LLAMA4 | {"head_dim": 128}, form)
    told = config["quantization_config"]
    key = "ignore" if "ignore" in told else "modules_to_not_convert"
    names = [f"model.layers.0.feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config["quantization_config"] = told | {key: [*told[key], *names]}
    spec = read_config(config)
    for path in names:
        stored |= {path: torch.randn(3, *((128, 768) if "gate_up" in path else (384, 128)))}
    experts = [name for name in meant if ".experts." in name]
    for name in experts:
        stored = {key: part for key, part in stored.items() if not key.startswith(name.removesuffix("weight"))}
    model = share(Checkpoint(save_folder(tmp_path, config, stored)), 0, 1, quantised=True)
    held = dict(model.parts())
    assert not isinstance(held["model.layers.0.feed_forward.shared_expert.up_proj.weight"], torch.Tensor)
    for name in experts:
        source = next(source for source in spec.tensors[name].sources if source.name in stored)
        assert source.expert is not None
        assert torch.equal(held[name], _of(source, stored[source.name][source.expert].t())), name  # type: ignore[arg-type]


def _of(stored: Stored, whole: torch.Tensor) -> torch.Tensor:
    """The rows of one of those that lie together."""
    if stored.run is None:
        return whole
    width, stride, offset = stored.run
    return whole.unflatten(0, (-1, stride))[:, offset : offset + width].flatten(0, 1)


def _place(tensor: TensorSpec) -> Stored:
    """Where matrices that are not experts of a stack lie together."""
    found = (source for source in tensor.sources if source.run is not None and not source.stacked)
    return next(found, Stored(tensor.name))


@pytest.mark.parametrize("form", ["modelopt fp8", "modelopt nvfp4", "gptq"])
@pytest.mark.parametrize("family", ["phi3", "qwen3_next"])
def test_what_there_is_once_of_matrices_that_lie_together_belongs_to_each(
    tmp_path: Path, family: str, form: str
) -> None:
    """A scale for all of a matrix, or the group of every input."""
    told, write = FORMS[form]
    config = json.loads(tiny_config(family).to_json_string()) | {"hidden_size": 128, "quantization_config": told}
    config |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16} if family == "qwen3_next" else {}
    spec, random = read_config(config), torch.Generator().manual_seed(3)
    together: dict[str, list[TensorSpec]] = defaultdict(list)
    for tensor in spec.tensors.values():
        if spec.is_quantised(tensor) and _place(tensor).run is not None:
            together[_place(tensor).name].append(tensor)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, parts in together.items():
        run, columns = _place(parts[0]).run, parts[0].shape[1]
        assert run is not None
        rows = parts[0].shape[0] // run.width * run.stride
        files, whole = write(name.removesuffix(".weight"), rows, columns, random)
        stored |= {key: part.contiguous() for key, part in files.items()}
        meant |= {part.name: _of(_place(part), whole) for part in parts}
    reader = Checkpoint(save_folder(tmp_path, config, stored)).open_reader(torch.device("cpu"))
    assert isinstance(reader, ViewReader)
    assert meant
    for name, values in meant.items():
        reader.check_pieces(spec.tensors[name])
        scheme, slices = reader.scheme_of(name), (slice(5, 21), slice(0, values.shape[1]))
        assert scheme is not None
        assert torch.equal(at_work(scheme).widen(reader.read_pieces(name, slices), slices), values[slices])
    reader.close()


DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.uint8, torch.int8])
@pytest.mark.parametrize("form", ["modelopt fp8", "fp8 ue8m0"])
def test_values_of_another_dtype_with_scales_beside_them_are_refused(
    tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    config, stored, _ = written(MODELS["llama"], form)
    stored[DOWN] = stored[DOWN].float().to(dtype) if dtype.is_floating_point else stored[DOWN].view(dtype)
    refused(tmp_path, config, stored, rf"{DOWN} is stored as \w+, .*(F8_E4M3|numbers are)")


def test_a_norm_in_whole_numbers_is_refused(tmp_path: Path) -> None:
    config, stored, _ = written(MODELS["llama"], "w4a16")
    stored["model.norm.weight"] = stored["model.norm.weight"].long()
    refused(tmp_path, config, stored, "model.norm.weight is stored as I64")


@pytest.mark.parametrize("experts", [2, 4])
def test_a_stack_of_more_or_fewer_experts_is_refused(tmp_path: Path, experts: int) -> None:
    spec = read_config(LLAMA4)
    stored = {name: values for name, values in random_tensors(spec).items() if ".experts." not in name}
    path = "model.layers.0.feed_forward.experts"
    stored |= {f"{path}.gate_up_proj": torch.zeros(3, 128, 768), f"{path}.down_proj": torch.zeros(experts, 384, 128)}
    refused(tmp_path, LLAMA4, stored, rf"{path}.down_proj has shape \[{experts}, 384, 128\].* of 3 experts")


def refused(folder: Path, config: Config, stored: Tensors, words: str) -> None:
    """By the check that comes before a rank takes memory."""
    checkpoint = Checkpoint(save_folder(folder, config, stored))
    reader = checkpoint.open_reader(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=words):
        check_tensors(Layout(checkpoint.spec, 1), reader)
    reader.close()
