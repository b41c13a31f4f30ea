"""`phalanx quantize`: checkpoints that others load too, with the numbers of their error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import CheckpointError, ConfigError
from phalanx.llm import LLM
from phalanx.models import read_config
from phalanx.spec.pooling import Pooling, pooling_of
from phalanx.weights import quantize as module
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.quantize import REPORT_FILE, quantize
from phalanx.weights.reader import SafetensorsReader
from tests.weights.conftest import COMMON, Config, random_tensors, save_folder

pytestmark = pytest.mark.slow

ALIGNED: Config = COMMON | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MODELS: dict[str, Config] = {
    "dense": ALIGNED | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tied": ALIGNED | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "experts": ALIGNED
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}
FORMATS = ("fp8-block", "fp8-channel")


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def made(folder: Path, config: Config) -> Path:
    """A checkpoint with weights of a usual size."""
    folder.mkdir()
    tensors = {name: values * 0.05 for name, values in random_tensors(read_config(config)).items()}
    tensors |= {name: values * 20 for name, values in tensors.items() if "norm" in name}
    save_folder(folder, config, tensors)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_and_agrees_with_us(tmp_path: Path, name: str, number_format: str) -> None:
    """Token for token, both with the weights that the checkpoint stands for."""
    output = tmp_path / "quantised"
    quantize(made(tmp_path / "plain", MODELS[name]), output, number_format, silent)
    prompt = [5, 9, 33, 7, 12, 60, 3]
    with LLM(str(output), tp=2, dtype="fp32") as llm:
        ours = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)).token_ids
    reference = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    loaded = dict(reference.named_parameters())["model.layers.1.self_attn.q_proj.weight"]
    assert loaded.shape == (512, 128)
    given = torch.tensor([prompt])
    if number_format == "fp8-block":
        theirs = reference.generate(given, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert ours == theirs[0, len(prompt) :].tolist()
    else:
        assert_close_logits(reference, output, given)


def assert_close_logits(reference: torch.nn.Module, output: Path, given: torch.Tensor) -> None:
    """compressed-tensors rounds activations of linear layers too: near, not equal."""
    with LLM(str(output), dtype="fp32") as llm:
        answer = llm.generate(given[0].tolist(), SamplingParams(max_tokens=1, temperature=0, logprobs=20))
    with torch.no_grad():
        theirs = reference(given).logits[0, -1].float().log_softmax(-1)
    assert answer.logprobs is not None
    off = [abs(float(theirs[token]) - logprob) for token, logprob in answer.logprobs[0].top]
    assert max(off) < 0.2


@pytest.mark.parametrize("number_format", FORMATS)
def test_the_report_tells_the_error_of_every_matrix(tmp_path: Path, number_format: str) -> None:
    source, output = made(tmp_path / "plain", MODELS["experts"]), tmp_path / "quantised"
    report = quantize(source, output, number_format, silent)
    spec = read_config(MODELS["experts"])
    linear = [name for name, tensor in spec.tensors.items() if tensor.is_linear]
    assert [error.name for error in report.errors] == linear
    before, after = SafetensorsReader(source), SafetensorsReader(output)
    suffix = "_scale_inv" if number_format == "fp8-block" else "_scale"
    for error in report.errors:
        whole = tuple(slice(0, size) for size in spec.tensors[error.name].shape)
        wide, values = before.read(error.name, whole), after.read(error.name, whole).float()
        grid = after.shape(error.name + suffix)
        assert grid is not None
        scales = after.read(error.name + suffix, tuple(slice(0, size) for size in grid)).float()
        tall, broad = (-(-size // count) for size, count in zip(wide.shape, grid, strict=True))
        meant = values * scales.repeat_interleave(tall, 0).repeat_interleave(broad, 1)
        assert error.relative == pytest.approx(float((meant - wide).norm() / wide.norm()), rel=1e-4)
        assert 0.01 < error.relative < 0.04
    assert json.loads((output / REPORT_FILE).read_text()) == report.to_dict()
    assert [layer for layer, *_ in report.layers()] == ["model.layers.0", "model.layers.1"]
    assert report.bytes_after < report.bytes_before


def test_what_is_no_linear_layer_is_as_it_was(tmp_path: Path) -> None:
    source, output = made(tmp_path / "plain", MODELS["experts"]), tmp_path / "quantised"
    quantize(source, output, "fp8-block", silent)
    before, after = SafetensorsReader(source), SafetensorsReader(output)
    for name, tensor in read_config(MODELS["experts"]).tensors.items():
        whole = tuple(slice(0, size) for size in tensor.shape)
        assert (after.dtype(name) == "F8_E4M3") == tensor.is_linear
        assert tensor.is_linear or torch.equal(before.read(name, whole), after.read(name, whole))
    told = json.loads((output / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert told == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert (output / "tokenizer_config.json").exists()


def test_large_checkpoints_are_dealt_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 100_000)
    output = tmp_path / "quantised"
    quantize(made(tmp_path / "plain", MODELS["dense"]), output, "fp8-block", silent)
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    with LLM(str(output)) as llm:
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def test_nothing_is_left_behind_where_it_fails(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "quantised", "fp8-block", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_an_empty_folder_is_filled_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    for name in ("here", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path(), tmp_path / "link", Path("..") / "deep" / "new" / ".." / "new"):
        quantize(source, output, "w4a16", silent)
        assert Checkpoint(output.resolve()).spec.number_format == "int4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "here", "link", "linked", "plain"]
    assert Path.cwd() == tmp_path / "here"
    with pytest.raises(ConfigError, match="cannot be written"):
        quantize(source, source / "config.json" / "new", "w4a16", silent)


def test_an_embedding_model_pools_as_before(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    module = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    (source / "modules.json").write_text(json.dumps([module]))
    quantize(source, tmp_path / "quantised", "w4a16", silent)
    assert (
        pooling_of(tmp_path / "quantised") == pooling_of(source) == Pooling("mean", False, "pooling_mode_mean_tokens")
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, number: float) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = number
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has numbers that are not finite"):
        quantize(source, tmp_path / "quantised", "fp8-channel", silent)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_command_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    script = (
        "import os, signal, phalanx.weights.quantize as module\n"
        "from phalanx.cli import app\n"
        "module._Shards.close = lambda shards: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"app(['quantize', {str(source)!r}, '--output', {str(tmp_path / 'new')!r}])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 128 + signal.SIGTERM, ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    source, output = made(tmp_path / "plain", MODELS["dense"]), tmp_path / "quantised"
    with pytest.raises(ConfigError, match="fp8-block or fp8-channel or awq or w4a16 or mxfp4"):
        quantize(source, output, "int3", silent)
    quantize(source, output, "fp8-block", silent)
    with pytest.raises(ConfigError, match="there already"):
        quantize(source, output, "fp8-block", silent)
    with pytest.raises(CheckpointError, match="quantised already, as fp8"):
        quantize(output, tmp_path / "twice", "fp8-block", silent)


def test_the_command_shows_layers_and_says_what_others_cannot_load(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", COMMON | {"model_type": "llama"})
    ran = CliRunner().invoke(app, ["quantize", str(source), "--output", str(tmp_path / "new")])
    assert ran.exit_code == 0, ran.output
    assert "model.layers.1" in ran.output
    assert "a side that 128 does not divide" in ran.output
    assert "MB" in ran.output or "GB" in ran.output
