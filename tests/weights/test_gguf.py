"""GGUF files: the header as the package reads it, slices as slices of the whole, names and rows as Hugging Face's."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from phalanx.errors import CheckpointError, ModelError, PhalanxError, RequestError
from phalanx.models import read_config
from phalanx.models.gguf import gguf_spec
from phalanx.quant.gguf import GgufWeight
from phalanx.spec import Layout, ModelSpec
from phalanx.spec.gguf import GgufFile
from phalanx.text import tokenizer
from phalanx.weights.checkpoint import Checkpoint, locate
from phalanx.weights.gguf_reader import GgufReader
from phalanx.weights.load import check_tensors, load_weights
from tests.conftest import plain_mappings
from tests.weights.conftest import CONFIGS, Config, build, random_tensors, write_gguf

WIDE: Config = CONFIGS["llama"] | {"hidden_size": 256, "num_hidden_layers": 1}
QUANTISED = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
SLICES = [
    (slice(0, 96), slice(0, 256)),
    (slice(0, 1), slice(0, 256)),
    (slice(32, 80), slice(0, 256)),
    (slice(0, 96), slice(64, 192)),
    (slice(95, 96), slice(255, 256)),
    (slice(7, 50), slice(13, 77)),
]
MATRIX = "model.layers.0.mlp.up_proj.weight"


def make(tmp_path: Path, config: Config, **options: Any) -> tuple[Path, dict[str, torch.Tensor], ModelSpec]:
    spec = read_config(config)
    tensors = random_tensors(spec)
    return write_gguf(tmp_path / "model.gguf", config, tensors, **options), tensors, spec


def write_matrix(tmp_path: Path, kind: Kind) -> tuple[Path, np.ndarray]:
    """A model file in which MATRIX is of this kind, and what the package makes of the whole matrix."""
    tensors = random_tensors(read_config(WIDE))
    values = tensors.pop(MATRIX).numpy()
    if kind in K_QUANTS:  # `quantize` lacks them; small bytes keep their scales finite
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        width = values.shape[1] // per_block * block_bytes
        raw = np.random.default_rng(0).integers(0, 0x3C, (values.shape[0], width), dtype=np.uint8)
    else:
        raw = gguf.quantize(values, kind)
    stored = "blk.0.ffn_up.weight"
    kinds = {} if kind in (Kind.F32, Kind.F16) else {stored: kind}
    return write_gguf(tmp_path / "model.gguf", WIDE, tensors, kinds, {stored: raw}), gguf.dequantize(raw, kind)


@pytest.fixture(scope="module")
def package_reader() -> gguf.GGUFReader:
    with plain_mappings():
        return gguf.GGUFReader(locate(None))


def test_the_header_is_what_the_package_reads(package_reader: gguf.GGUFReader) -> None:
    file = GgufFile(locate(None))
    theirs = {name: field for name, field in package_reader.fields.items() if not name.startswith("GGUF.")}
    assert list(file.fields) == list(theirs)
    for name, field in theirs.items():
        assert file.fields[name] == field.contents(), name


def test_tensors_lie_where_the_package_finds_them(package_reader: gguf.GGUFReader) -> None:
    file = GgufFile(locate(None))
    assert list(file.tensors) == [tensor.name for tensor in package_reader.tensors]
    for tensor in package_reader.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.kind == tensor.tensor_type
        assert file.data_start + found.offset == tensor.data_offset


def test_the_default_model_is_read_as_the_package_dequantises_it(package_reader: gguf.GGUFReader) -> None:
    whole = {tensor.name: tensor for tensor in package_reader.tensors}
    reader = GgufReader(locate(None))
    for theirs, ours, rows, columns in (
        ("token_embd.weight", "model.embed_tokens.weight", slice(4000, 4200), slice(0, 576)),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", slice(0, 576), slice(512, 1024)),
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight", slice(64, 128), slice(0, 576)),
    ):
        expected = gguf.dequantize(whole[theirs].data[rows], whole[theirs].tensor_type)[:, columns]
        assert np.array_equal(reader.read(ours, (rows, columns)).numpy(), expected)


@pytest.mark.parametrize("kind", [*QUANTISED, *K_QUANTS], ids=lambda kind: kind.name)
def test_a_slice_is_the_slice_of_the_whole_tensor(tmp_path: Path, kind: Kind) -> None:
    path, whole = write_matrix(tmp_path, kind)
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) > 10
    reader = GgufReader(path)
    assert reader.shape(MATRIX) == (96, 256)
    for slices in SLICES:
        found = reader.read(MATRIX, slices)
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), whole[slices])
        assert found.is_contiguous()


@pytest.mark.parametrize("kind", QUANTISED[3:], ids=lambda kind: kind.name)
def test_blocks_held_as_stored_are_what_the_package_dequantises(kind: Kind) -> None:
    """Every code, sign and minimum, bit for bit: what compares our own ways with each other would miss a wrong one."""
    values = np.random.default_rng(1).normal(size=(32, 256)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    whole = torch.from_numpy(gguf.dequantize(raw, kind))
    assert whole.min() < -1 < 1 < whole.max()
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    weight = GgufWeight(kind.name, 256, torch.from_numpy(raw).unflatten(1, (-1, block_bytes)))
    assert torch.equal(weight.dequantised(torch.float32), whole)
    assert torch.equal(weight.panels().dequantised(torch.float32), whole)


@pytest.mark.parametrize("kind", [*QUANTISED, *K_QUANTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("slices", [(slice(0, 96), slice(128, 128)), (slice(40, 40), slice(0, 256))], ids=str)
def test_an_empty_slice_is_empty(tmp_path: Path, kind: Kind, slices: tuple[slice, slice]) -> None:
    path, whole = write_matrix(tmp_path, kind)
    assert GgufReader(path).read(MATRIX, slices).shape == whole[slices].shape


def test_long_tensors_are_dequantised_in_steps_without_a_seam(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"vocab_size": 8200, "num_hidden_layers": 1}
    path, tensors, _ = make(tmp_path, config, kinds={"token_embd.weight": Kind.Q8_0})
    whole = gguf.dequantize(gguf.quantize(tensors["model.embed_tokens.weight"].numpy(), Kind.Q8_0), Kind.Q8_0)
    reader = GgufReader(path)
    for rows in (slice(0, 8200), slice(4095, 4097), slice(100, 4300), slice(4096, 8192)):
        found = reader.read("model.embed_tokens.weight", (rows, slice(0, 64)))
        assert np.array_equal(found.numpy(), whole[rows])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_vectors_may_be_in_any_plain_format(tmp_path: Path, kind: Kind) -> None:
    path, tensors, _ = make(tmp_path, CONFIGS["llama"], kinds={"output_norm.weight": kind})
    whole = gguf.dequantize(gguf.quantize(tensors["model.norm.weight"].numpy(), kind), kind)
    for part in (slice(0, 64), slice(10, 20)):
        assert np.array_equal(GgufReader(path).read("model.norm.weight", (part,)).numpy(), whole[part])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gguf_file_has_the_spec_and_the_tensors_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    """Numbers as in config.json; names, shapes and row order as in the safetensors files."""
    path, tensors, spec = make(tmp_path, CONFIGS[name])
    found = Checkpoint(path).spec
    assert found.norm_eps == pytest.approx(spec.norm_eps)
    assert dataclasses.replace(found, norm_eps=spec.norm_eps) == spec
    assert found.tensors == spec.tensors
    reader = Checkpoint(path).open_reader(torch.device("cpu"))
    for tensor in spec.tensors.values():
        assert reader.shape(tensor.name) == tensor.shape
        whole = reader.read(tensor.name, tuple(slice(0, size) for size in tensor.shape))
        assert torch.equal(whole, tensors[tensor.name]), tensor.name
    reader.close()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_reads_its_slices(tmp_path: Path, name: str, size: int) -> None:
    """q and k are put in order within each head, so any whole heads can be read alone."""
    path, tensors, spec = make(tmp_path, CONFIGS[name])
    for rank in range(size):
        model = build(Checkpoint(path).spec, rank, size)
        load_weights(model, GgufReader(path), lambda done, total: None)
        for part_name, part in model.parts():
            slices = Layout(spec, size).slices(spec.tensors[part_name], rank)
            assert torch.equal(part, tensors[part_name][slices]), part_name


def test_names_that_are_not_there_have_no_shape(tmp_path: Path) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama_tied"])
    reader = GgufReader(path)
    for name in ("lm_head.weight", "model.layers.9.mlp.up_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight"):
        assert reader.shape(name) is None


def test_a_missing_tensor_is_named_before_anything_is_read(tmp_path: Path) -> None:
    spec = read_config(CONFIGS["llama"])
    tensors = random_tensors(spec)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "model.gguf", CONFIGS["llama"], tensors)
    with pytest.raises(CheckpointError, match=r"lacks 1 of \d+ tensors: model.layers.1.mlp.up_proj.weight") as error:
        check_tensors(Layout(spec, 1), GgufReader(path))
    assert error.value.code == "missing_tensor"


def test_a_table_of_rope_factors_is_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    path, _, _ = make(tmp_path, CONFIGS["llama"], extra=extra)
    with pytest.raises(ModelError, match="rope_freqs") as error:
        Checkpoint(path)
    assert error.value.code == "unsupported_rope"


def test_an_architecture_that_is_not_run_is_refused(tmp_path: Path) -> None:
    path, _, _ = make(tmp_path, CONFIGS["qwen3"])
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"gemma"))
    with pytest.raises(ModelError, match="gemma"):
        Checkpoint(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate.bias", "blk.2.attn_norm.weight", "output.bias"])
def test_a_tensor_that_belongs_to_nothing_is_refused(tmp_path: Path, name: str) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama"], extra={name: np.ones(8, dtype=np.float32)})
    checkpoint = Checkpoint(path)
    reader = checkpoint.open_reader(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=rf"1 tensors that .* such as {name}"):
        check_tensors(Layout(checkpoint.spec, 1), reader)
    reader.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ({"rope.scaling.factor": 4.0}, "rope.scaling.factor = 4.0"),
        ({"rope.scale_linear": 4.0}, "rope.scale_linear"),
        ({"attention.sliding_window": 512}, "sliding_window"),
        ({"logit_scale": 7.0}, "logit_scale"),
        ({"rope.dimension_count": 16, "rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, None),
        ({"attention.sliding_window": 0, "logit_scale": 1.0, "rope.scale_linear": 1.0}, None),
    ],
)
def test_a_field_that_would_change_answers_and_is_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], named: str | None
) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama"])
    file = GgufFile(path)
    for key, value in fields.items():
        monkeypatch.setitem(file.fields, f"llama.{key}", value)
    if named is None:
        gguf_spec(file)
        return
    with pytest.raises(ModelError, match=named) as error:
        gguf_spec(file)
    assert error.value.code == "unknown_field"


@pytest.mark.parametrize(
    ("field", "value"), [("rope.freq_base", -1.0), ("attention.layer_norm_rms_epsilon", float("nan"))]
)
def test_a_number_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: float
) -> None:
    file = GgufFile(make(tmp_path, CONFIGS["llama"])[0])
    monkeypatch.setitem(file.fields, f"llama.{field}", value)
    with pytest.raises(ModelError, match=str(value)) as error:
        gguf_spec(file)
    assert error.value.code == "bad_config"


LIES: list[dict[str, Any]] = [
    {"eos_token_id": 5},
    {"bos_token_id": -1},
    {"eos_token_id": [1]},
    {"merges": ["a q"]},
    {"merges": ["ab"]},
    {"token_type": [1, 1]},
    {"tokens": 5},
    {"tokens": "llama-bpe"},
    {"pre": []},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_tokenizer_that_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any]) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama"])
    told = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab", "c", "d"],
        "token_type": [1] * 5,
        "merges": ["a b"],
        "pre": "default",
    }
    file = GgufFile(path)
    for key, value in ({"bos_token_id": 3, "eos_token_id": 4} | told).items():
        monkeypatch.setitem(file.fields, f"tokenizer.ggml.{key}", value)
    assert tokenizer._read_gguf(file).encode("ab") == [2]
    for key, value in lie.items():
        monkeypatch.setitem(file.fields, f"tokenizer.ggml.{key}", value)
    with pytest.raises(PhalanxError) as error:
        tokenizer._read_gguf(file)
    assert error.value.code in ("broken_file", "unsupported_tokenizer")


def test_a_tokenizer_with_odd_words_and_a_template_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama"])
    words = ["a", "\u2581x", "\U0001f600"]
    told = {"model": "gpt2", "tokens": words, "token_type": [1] * 3, "merges": [], "pre": "default"}
    file = GgufFile(path)
    for key, value in told.items():
        monkeypatch.setitem(file.fields, f"tokenizer.ggml.{key}", value)
    monkeypatch.setitem(file.fields, "tokenizer.chat_template", "{{ 1 / 0 }}")
    found = tokenizer.Tokenizer(tokenizer._read_gguf(file))
    assert [found.token_bytes(token).decode() for token in range(3)] == ["a", " x", "\U0001f600"]
    with pytest.raises(RequestError, match="division by zero"):
        found.render_chat([{"role": "user", "content": "hello"}])


def test_a_file_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    """An adapter, say: a good GGUF file with other tensors."""
    write_gguf(tmp_path / "adapter.gguf", CONFIGS["llama"], {"model.norm.weight": torch.ones(64)})
    with pytest.raises(PhalanxError):
        Checkpoint(tmp_path / "adapter.gguf")


def assert_broken(path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        Checkpoint(path).open_reader(torch.device("cpu"))
    assert error.value.code == "broken_file"
    assert str(path) in error.value.found


def test_a_missing_or_foreign_file_is_broken(tmp_path: Path) -> None:
    assert_broken(tmp_path / "missing.gguf")
    for number, content in enumerate(
        [b"", b"GGU", b"PK\3\4" + bytes(100), b"GGUF" + bytes(4), b"GGUF\x63" + bytes(99)]
    ):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        assert_broken(path)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_header_cut_short_is_broken(tmp_path: Path, share: float) -> None:
    path, _, _ = make(tmp_path, CONFIGS["llama"])
    header = GgufFile(path).data_start - 32
    path.write_bytes(path.read_bytes()[: int(header * share)])
    assert_broken(path)


@pytest.mark.parametrize("missing", [1, 1000, 40000])
def test_a_file_whose_data_is_cut_short_is_broken(tmp_path: Path, missing: int) -> None:
    """A download that stopped: the header promises more than there is, which is seen before anything is read."""
    path, _, _ = make(tmp_path, CONFIGS["llama"])
    path.write_bytes(path.read_bytes()[:-missing])
    assert_broken(path)


@pytest.mark.parametrize("length", [2**40, 2**62, 2**64 - 1])
def test_a_header_with_impossible_lengths_is_broken(tmp_path: Path, length: int) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + (1).to_bytes(8, "little") * 2 + length.to_bytes(8, "little") + bytes(64))
    assert_broken(path)


def test_a_value_that_the_file_ends_within_is_broken(tmp_path: Path) -> None:
    """Though it claims no more bytes than the file has."""
    key, cut = b"general.architecture", struct.pack("<IQ", 8, 30) + b"llama"
    path = tmp_path / "cut.gguf"
    path.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + cut)
    with pytest.raises(CheckpointError, match="ends within a value of 30 bytes"):
        GgufFile(path)
