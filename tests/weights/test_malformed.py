"""Files that are not what they should be, by accident or on purpose: an error that says so, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from phalanx.errors import CheckpointError, PhalanxError
from phalanx.models import read_config
from phalanx.spec import Layout
from phalanx.spec.gguf import GgufFile
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import check_tensors
from tests.weights.conftest import CONFIGS, random_tensors, write_gguf

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1}
few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(path: Path) -> None:
    """All that loading would read."""
    checkpoint = Checkpoint(path)
    reader = checkpoint.open_reader(torch.device("cpu"))
    try:
        check_tensors(Layout(checkpoint.spec, 1), reader)
        for name, tensor in checkpoint.spec.tensors.items():
            shape = reader.shape(name)
            assert shape == tensor.shape
            assert reader.read(name, tuple(slice(0, size) for size in tensor.shape)).shape == tensor.shape
    finally:
        reader.close()


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """A file of some kilobytes is no reason to ask for gigabytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    (used,) = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(used) * 1024 + 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refusal(read: Callable[[], object]) -> PhalanxError | None:
    """Why it cannot be read, in words that fit a screen; None if it can."""
    refused: PhalanxError | None = None
    try:
        with little_memory():
            read()
    except PhalanxError as error:
        refused = error
    if refused is not None:
        assert 10 < len(refused.found) < 1000, refused.found
        assert refused.fix
    return refused


def read_or_refuse(path: Path) -> PhalanxError | None:
    return refusal(lambda: read_all(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(read_config(CONFIG)), folder / "model.safetensors")
    read_all(folder)
    return folder


def linked(folder: Path, to: Path, without: str) -> Path:
    """A folder with all of the other's files but one."""
    for file in folder.iterdir():
        target = to / file.name
        target.unlink(missing_ok=True)
        if file.name != without:
            target.symlink_to(file)
    return to


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@few
@given(data=st.data())
def test_safetensors_headers(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Offsets that overlap or reach beyond the file, shapes and types that do not fit, members that are not there."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    names = sorted(header)
    for _ in range(data.draw(st.integers(1, 3))):
        entry = header[data.draw(st.sampled_from(names))]
        match data.draw(st.sampled_from(["offsets", "of another", "shape", "dtype", "junk", "remove"])):
            case "offsets":
                entry["data_offsets"] = data.draw(st.lists(st.integers(-5, 2**64), min_size=2, max_size=2))
            case "of another":
                entry["data_offsets"] = header[data.draw(st.sampled_from(names))].get("data_offsets")
            case "shape":
                entry["shape"] = data.draw(st.lists(st.integers(0, 2**63), max_size=3))
            case "dtype":
                entry["dtype"] = data.draw(st.sampled_from(["F32", "F16", "F8_E4M3", "I64", "BOOL", "X", ""]))
            case "junk":
                entry[data.draw(st.sampled_from(["shape", "dtype", "data_offsets"]))] = data.draw(junk)
            case _:
                entry.pop("shape", None)
    told = json.dumps(header).encode()
    claimed = data.draw(st.sampled_from([len(told), len(told) - 1, len(told) + 8, 0, 2**40, 2**64 - 1]))
    linked(folder, tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + told + raw[8 + length :])
    read_or_refuse(tmp_path)


@few
@given(data=st.data())
def test_configurations(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    config: dict[str, Any] = dict(CONFIG)
    for _ in range(data.draw(st.integers(1, 3))):
        config[data.draw(st.sampled_from(sorted(CONFIG)))] = data.draw(junk)
    linked(folder, tmp_path, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal(lambda: Checkpoint(tmp_path))


SECTIONS: dict[str, dict[str, Any]] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
    "text_config": {"hidden_size": 8, "num_hidden_layers": 1},
}


@few
@given(data=st.data())
def test_sections_of_configurations_of_every_family(tmp_path: Path, data: st.DataObject) -> None:
    """Of all families here: their own fields, and sections within, with anything in them."""
    config: dict[str, Any] = dict(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    name = data.draw(st.sampled_from(sorted(SECTIONS)))
    config[name] = dict(SECTIONS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([config, config[name]]))
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(junk)
        if not isinstance(config.get(name), dict):
            break
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal(lambda: Checkpoint(tmp_path))


@few
@given(data=st.data())
def test_files_that_end_too_early_are_refused(
    folder: Path, gguf_bytes: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["config.json", "model.safetensors", "model.gguf"]))
    whole = gguf_bytes if name == "model.gguf" else (folder / name).read_bytes()
    linked(folder, tmp_path, name)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert read_or_refuse(tmp_path / name if name == "model.gguf" else tmp_path) is not None
    (tmp_path / name).unlink()


def test_tensors_that_lie_upon_each_other_are_refused(folder: Path, tmp_path: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    one, other = (name for name in sorted(header) if name.endswith("layernorm.weight"))
    header[one]["data_offsets"] = header[other]["data_offsets"]
    told = json.dumps(header).encode()
    linked(folder, tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + raw[8 + length :])
    refused = read_or_refuse(tmp_path)
    assert refused is not None
    assert refused.code == "broken_file"
    assert "model.safetensors" in refused.found


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [{}]}', '{"eos_token_id": -1}', "[" * 10**5],
)
def test_generation_configurations(folder: Path, tmp_path: Path, text: str) -> None:
    linked(folder, tmp_path, "generation_config.json")
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert caught.value.code == "broken_file"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": {}}}', "[" * 10**5]
)
def test_indices(folder: Path, tmp_path: Path, text: str) -> None:
    linked(folder, tmp_path, "model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_all(tmp_path)
    assert caught.value.code == "broken_file"


def test_an_index_does_not_lead_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = str(folder / "model.safetensors")
    linked(folder, tmp_path, "model.safetensors")
    for name in (outside, f"../{folder.name}/model.safetensors", "..", "."):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError):
            read_all(tmp_path)


SECRET = "the-secret-of-another-file"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_to_another_file_tells_nothing_of_it(folder: Path, tmp_path: Path, name: str) -> None:
    """Hugging Face's own cache is made of links, so they are followed; but what is no model stays untold."""
    (tmp_path / "secret").write_text(SECRET)
    model = tmp_path / "model"
    model.mkdir()
    linked(folder, model, name)
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises(PhalanxError) as caught:
        Tokenizer.load(model) if name == "tokenizer.json" else read_all(model)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "model.gguf"])
def test_what_is_no_file_is_not_opened(folder: Path, tmp_path: Path, name: str) -> None:
    """A pipe would never begin, a device never end."""
    linked(folder, tmp_path, name)
    os.mkfifo(tmp_path / name)
    if name == "tokenizer.json":
        assert Tokenizer.load(tmp_path) is None
    else:
        with pytest.raises(CheckpointError):
            read_all(tmp_path if name == "model.safetensors" else tmp_path / name)


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 0, "content": "<e>", "special": True}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"<e>": 0, "a": 1}, "unk_token": "<e>"},
}


@settings(few, max_examples=60)
@given(data=st.data())
def test_tokenizers(tmp_path: Path, data: st.DataObject) -> None:
    described: dict[str, Any] = json.loads(json.dumps(TOKENIZER))
    where = data.draw(st.sampled_from([described, described["model"], described["added_tokens"][0]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(junk)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    refusal(lambda: Tokenizer.load(tmp_path))


@settings(few, max_examples=60)
@given(data=st.data())
def test_what_stands_beside_a_tokenizer(tmp_path: Path, data: st.DataObject) -> None:
    """Nor does any of it run code: a class of the folder's own is not imported."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "eos_token": "<e>",
        "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"0": {"content": "<e>", "special": True}},
        "model_max_length": 8,
    }
    (tmp_path / "evil.py").write_text("raise SystemExit('the folder ran code')")
    described[data.draw(st.sampled_from(sorted(described)))] = data.draw(junk)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))

    def use() -> None:
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        assert all(isinstance(each, str) for each in tokenizer.chat_templates.values())
        assert isinstance(tokenizer.encode("a"), list)

    refusal(use)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, CONFIG, random_tensors(read_config(CONFIG)))
    read_all(path)
    return path.read_bytes()


@few
@given(data=st.data())
def test_gguf_headers(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    end = GgufFile(path).data_start
    changed = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, end - 1))
        some = data.draw(
            st.sampled_from([b"\xff" * 8, bytes(8), b"\x09\0\0\0", b"\x08\0\0\0", b"\x01", b"\x7f", b"\0\x01"])
        )
        changed[at : at + len(some)] = some
    path.write_bytes(changed)
    read_or_refuse(path)


@few
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:invalid value")
def test_gguf_tensors(gguf_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Shapes, kinds and places of tensors that are well formed and wrong."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    names = sorted(GgufFile(path).tensors)
    name = data.draw(st.sampled_from(names)).encode()
    at = gguf_bytes.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (rank,) = struct.unpack_from("<I", gguf_bytes, at)
    changed = bytearray(gguf_bytes)
    large = st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]) | st.integers(0, 4096)
    match data.draw(st.sampled_from(["shape", "kind", "offset"])):
        case "shape":
            struct.pack_into("<Q", changed, at + 4 + 8 * data.draw(st.integers(0, rank - 1)), data.draw(large))
        case "kind":
            struct.pack_into("<I", changed, at + 4 + 8 * rank, data.draw(st.integers(0, 50)))
        case _:
            struct.pack_into("<Q", changed, at + 8 + 8 * rank, data.draw(large))
    path.write_bytes(changed)
    read_or_refuse(path)


def header(fields: bytes, count: int, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + fields + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1), "arrays of arrays"),
        (header(ARCHITECTURE + text(b"general.alignment") + struct.pack("<II", 4, 0), 2), "alignment"),
        (header(b"", 0), "architecture"),
        (header(text(b"general.architecture") + struct.pack("<II", 4, 7), 1), "architecture"),
        (header(ARCHITECTURE, 1, text(b"t") + struct.pack("<IIQ", 0, 0, 0), 1), "0 dimensions"),
        (header(ARCHITECTURE, 1, text(b"t") + struct.pack("<I", 2**31), 1), "dimensions"),
    ],
    ids=["nested arrays", "alignment 0", "no architecture", "a number for an architecture", "rank 0", "a huge rank"],
)
def test_gguf_files_that_once_ended_in_a_traceback(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(path)
    assert caught.value.code == "broken_file"
