"""What ranks hold, counted without loading it: the bytes of the files where weights stay as they are stored."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from phalanx.fabric.group import Solo
from phalanx.kernels import cpu
from phalanx.layers.decoder import Decoder
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import HeldWeights, held_weights
from phalanx.runtime.rank import load_model
from phalanx.spec.gguf import GgufFile
from phalanx.weights.checkpoint import Checkpoint, locate
from tests.runtime.test_stored_on_cpu import IN_PANELS, MODELS, folder_of, gguf_of, needs_compiler
from tests.weights.conftest import save_folder
from tests.weights.test_formats import written

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def held(path: Path, device: torch.device = CPU, tp: int = 1, dtype: str = "auto") -> HeldWeights:
    return held_weights(EngineConfig(tp=tp, dtype=dtype), Checkpoint(path), device, all_ranks=True)


def weight_bytes(of: HeldWeights) -> int:
    return of.linear + of.experts + of.head


@needs_compiler
def test_of_the_default_model_it_is_the_bytes_of_its_file() -> None:
    """Each of its tensors begins at a multiple of 32 bytes; two ranks have the norms twice."""
    path = locate(None)
    file, found = GgufFile(path), held(path)
    stored = path.stat().st_size - file.data_start
    assert 0 <= stored - weight_bytes(found) < 32 * len(file.tensors)
    assert found.head == file.tensors["token_embd.weight"].bytes
    assert found.scheme is not None
    assert found.scheme.format.name == "q4_1"
    norms = sum(each.bytes for each in file.tensors.values() if len(each.shape) == 1)
    assert weight_bytes(held(path, tp=2)) == weight_bytes(found) + norms
    wide = held(path, dtype="fp32")
    assert weight_bytes(wide) == 4 * Checkpoint(path).spec.parameters
    assert wide.scheme is None


@needs_compiler
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_of_other_files_too(tmp_path: Path, model: str, kind: Kind) -> None:
    path = gguf_of(tmp_path, model, kind)
    stored = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    found = held(path)
    assert weight_bytes(found) == sum(stored.values())
    assert found.experts == sum(size for name, size in stored.items() if "_exps" in name)


@needs_compiler
@pytest.mark.parametrize("tp", [1, 3])
def test_products_whose_parts_are_of_different_kinds_are_counted_widened(tmp_path: Path, tp: int) -> None:
    path = gguf_of(tmp_path, "llama", Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.Q5_0)
    assert weight_bytes(held(path, tp=1)) == loaded_bytes(path)
    assert weight_bytes(held(path, tp=tp)) > sum(int(each.n_bytes) for each in gguf.GGUFReader(path).tensors)


def loaded_bytes(path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "lay_out", lambda model: None)
        model = load_model(EngineConfig(device="cpu"), Checkpoint(path), Solo(), lambda done, total: None)
    head = {name: part for name, part in model.parts() if model.head.tied or name != "model.embed_tokens.weight"}
    return sum(part.nbytes for part in head.values())


@needs_compiler
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", IN_PANELS)
def test_formats_of_folders_on_a_cpu_as_loaded(tmp_path: Path, form: str, model: str) -> None:
    path = folder_of(tmp_path, model, form)
    assert weight_bytes(held(path)) == loaded_bytes(path)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["fp8 ue8m0", "compressed mxfp4"])
def test_a_gpu_holds_the_bytes_of_the_files_and_the_rest_in_half_precision(
    tmp_path: Path, form: str, model: str
) -> None:
    """Scales of FP8 become float32, whatever they are stored in; those of four bits are held for 256 columns each."""
    inner = "intermediate_size" if model == "llama" else "moe_intermediate_size"
    config, tensors, _ = written(MODELS[model] | {"hidden_size": 256, "head_dim": 128, inner: 768}, form)
    path, wide = save_folder(tmp_path, config, tensors), form.startswith("fp8")
    with safe_open(path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del stored["model.embed_tokens.weight"]
    plain = sum(2 * each.numel() for each in stored.values() if each.dtype == torch.float32)
    quantised = [(name, each) for name, each in stored.items() if each.dtype != torch.float32]
    expected = plain + sum(4 * each.numel() if wide and "scale" in name else each.nbytes for name, each in quantised)
    assert weight_bytes(held(path, GPU, dtype="bf16")) == expected


def test_without_a_compiler_all_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    path = locate(None)
    assert weight_bytes(held(path)) == 4 * Checkpoint(path).spec.parameters
