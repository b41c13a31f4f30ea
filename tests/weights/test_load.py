"""Every rank loads exactly its slices of a checkpoint, and a bad checkpoint is refused before anything is read."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.layers.decoder import Decoder
from phalanx.models import read_config
from phalanx.spec import Layout, ModelSpec
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import load_weights
from phalanx.weights.reader import DummyReader, Reader, SafetensorsReader, Slices
from tests.weights.conftest import CONFIGS, Tensors, build, random_tensors, save_folder

SIZES = [1, 2, 3, 4, 5]


CPU = torch.device("cpu")


class CountingReader:
    """Notes every read that passes through."""

    def __init__(self, reader: Reader, reads: list[tuple[str, int]]) -> None:
        self._reader = reader
        self._reads = reads

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._reader.shape(name)

    def scheme_of(self, name: str) -> None:
        return None

    def read(self, name: str, slices: Slices) -> Tensor:
        values = self._reader.read(name, slices)
        self._reads.append((name, values.numel()))
        return values

    def unknown(self) -> list[str]:
        return self._reader.unknown()

    def close(self) -> None:
        self._reader.close()


def load(spec: ModelSpec, reader: Reader, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build(spec, rank, size, dtype)
    load_weights(model, reader, lambda done, total: None)
    return model


def reassemble(models: list[Decoder]) -> Tensors:
    """Whole tensors from the parts of all ranks; a part that several hold must be the same on each."""
    spec, layout = models[0].place.spec, models[0].place.layout
    whole = {name: torch.full(tensor.shape, torch.nan) for name, tensor in spec.tensors.items()}
    for rank, model in enumerate(models):
        for name, part in model.parts():
            region = whole[name][layout.slices(spec.tensors[name], rank)]
            assert part.shape == region.shape
            assert torch.equal(region[~region.isnan()], part[~region.isnan()].float())
            region.copy_(part)
    return whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_a_decoder_are_the_tensors_of_its_spec(name: str, size: int) -> None:
    """Every name once, on every rank, in memory that no two parts share."""
    spec = read_config(CONFIGS[name])
    for rank in range(size):
        parts = list(build(spec, rank, size).parts())
        assert sorted(part for part, _ in parts) == sorted(spec.tensors)
        for index, (_, part) in enumerate(parts):
            part.fill_(index)
        assert all((part == index).all() for index, (_, part) in enumerate(parts))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_ranks_together_hold_the_checkpoint_bit_for_bit(tmp_path: Path, name: str, size: int) -> None:
    spec = read_config(CONFIGS[name])
    tensors = random_tensors(spec)
    reader = SafetensorsReader(save_folder(tmp_path, CONFIGS[name], tensors, files=size))
    models = [load(spec, reader, rank, size) for rank in range(size)]
    whole = reassemble(models)
    for tensor in spec.tensors.values():
        assert torch.equal(whole[tensor.name], tensors[tensor.name]), tensor.name
    assert all(model.place.layout.tp == size for model in models)


@pytest.mark.parametrize("size", [1, 2])
def test_projections_lie_in_the_order_in_which_they_are_multiplied(tmp_path: Path, size: int) -> None:
    """q, k, v and gate, up stand below each other, of each expert too."""
    for name in ("qwen2", "qwen3_moe"):
        spec = read_config(CONFIGS[name])
        tensors = random_tensors(spec)
        reader = SafetensorsReader(save_folder(tmp_path, CONFIGS[name], tensors))
        layout = Layout(spec, size)

        def share(tensor: str, tensors: Tensors = tensors, layout: Layout = layout) -> Tensor:
            return tensors[tensor][layout.slices(layout.spec.tensors[tensor], size - 1)]

        layer: Any = load(spec, reader, size - 1, size).layers[1]
        prefix = "model.layers.1."
        qkv = [f"{prefix}self_attn.{letter}_proj." for letter in "qkv"]
        assert torch.equal(layer.mixer.qkv.product.weight, torch.cat([share(part + "weight") for part in qkv]))
        if spec.moe is None:
            assert torch.equal(layer.mixer.qkv.product.bias, torch.cat([share(part + "bias") for part in qkv]))
            gate_up = [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]
            assert torch.equal(layer.ffn.gate_up.product.weight, torch.cat([share(part) for part in gate_up]))
            continue
        for expert in range(spec.moe.experts):
            gate_up = [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up")]
            assert torch.equal(layer.ffn.gate_up[expert], torch.cat([share(part) for part in gate_up]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_reads_its_own_slices_and_nothing_else(tmp_path: Path, name: str, size: int) -> None:
    spec = read_config(CONFIGS[name])
    folder = save_folder(tmp_path, CONFIGS[name], random_tensors(spec))
    for rank in range(size):
        reads: list[tuple[str, int]] = []
        model = load(spec, CountingReader(SafetensorsReader(folder), reads), rank, size)
        expected = {name: part.numel() for name, part in model.parts() if part.numel()}
        assert len(reads) == len(expected)
        assert dict(reads) == expected


def test_progress_counts_the_bytes_of_the_share() -> None:
    spec = read_config(CONFIGS["qwen3"])
    model, seen = build(spec, 1, 3), list[tuple[int, int]]()
    load_weights(model, DummyReader(spec, CPU), lambda done, total: seen.append((done, total)))
    own = sum(part.nbytes for _, part in model.parts())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (own, own)
    assert {total for _, total in seen} == {own}


def test_a_bf16_checkpoint_loads_in_bf16_and_in_fp32(tmp_path: Path) -> None:
    spec = read_config(CONFIGS["qwen2"])
    tensors = random_tensors(spec, torch.bfloat16)
    reader = SafetensorsReader(save_folder(tmp_path, CONFIGS["qwen2"], tensors))
    for dtype in (torch.bfloat16, torch.float32):
        for name, part in load(spec, reader, dtype=dtype).parts():
            assert part.dtype == dtype
            assert torch.equal(part.to(torch.bfloat16), tensors[name])


def refused(folder: Path, code: str) -> CheckpointError:
    """Loading fails with this code, with nothing read."""
    reads: list[tuple[str, int]] = []

    def attempt() -> None:
        checkpoint = Checkpoint(folder)
        load(checkpoint.spec, CountingReader(checkpoint.open_reader(torch.device("cpu")), reads))

    with pytest.raises(CheckpointError) as error:
        attempt()
    assert reads == []
    assert error.value.code == code
    return error.value


def test_missing_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    tensors = random_tensors(read_config(CONFIGS["llama"]))
    total = len(tensors)
    for letter in "kv":
        for layer in range(2):
            del tensors[f"model.layers.{layer}.self_attn.{letter}_proj.weight"]
    error = refused(save_folder(tmp_path, CONFIGS["llama"], tensors), "missing_tensor")
    named = ", ".join(f"model.layers.{at}_proj.weight" for at in ("0.self_attn.k", "0.self_attn.v", "1.self_attn.k"))
    assert error.found == f"The checkpoint lacks 4 of {total} tensors: {named} and 1 more."


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = random_tensors(read_config(CONFIGS["llama"]))
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    error = refused(save_folder(tmp_path, CONFIGS["llama"], tensors), "misshapen_tensor")
    assert error.found == f"{name} has shape [96, 64], but the configuration makes it [64, 96]."


def test_missing_files_of_a_sharded_checkpoint_are_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, CONFIGS["llama"], random_tensors(read_config(CONFIGS["llama"])), files=4)
    for number in (2, 3):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    error = refused(folder, "missing_file")
    assert "model-00002-of-00004.safetensors, model-00003-of-00004.safetensors" in error.found


@pytest.mark.parametrize("keep", [0, 7, 500, -1, -5000])
def test_a_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    folder = save_folder(tmp_path, CONFIGS["llama"], random_tensors(read_config(CONFIGS["llama"])), files=2)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(folder, "broken_file").found


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}', "\xff"])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    folder = save_folder(tmp_path, CONFIGS["llama"], random_tensors(read_config(CONFIGS["llama"])), files=2)
    (folder / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    assert "model.safetensors.index.json" in refused(folder, "broken_file").found


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    assert "found none" in refused(tmp_path, "no_weights").found
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert "only pytorch_model.bin, a pickle" in refused(tmp_path, "no_weights").found


def test_dummy_weights_are_the_same_wherever_they_are_held() -> None:
    """Deterministic; whole tensors and shared KV heads alike on every rank; norms one, all else small."""
    spec = read_config(CONFIGS["qwen2"])
    reassemble([load(spec, DummyReader(spec, CPU), rank, 5) for rank in range(5)])
    once, again = (dict(load(spec, DummyReader(spec, CPU)).parts()) for _ in range(2))
    for name, part in once.items():
        assert torch.equal(part, again[name])
        if "norm" in name:
            assert (part == 1).all()
        else:
            assert 0.01 < part.std() < 0.03
    assert len({part.flatten()[0].item() for name, part in once.items() if "norm" not in name}) > 10
    assert DummyReader(spec, CPU).shape("lm_head.weight") == (80, 64)
    assert DummyReader(spec, CPU).shape("nonsense") is None
    assert prod(DummyReader(spec, CPU).read("lm_head.weight", (slice(8, 24), slice(0, 64))).shape) == 16 * 64
