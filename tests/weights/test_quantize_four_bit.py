"""`phalanx quantize` to four bits: files that compressed-tensors reads too, and scales that go by inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

from phalanx.bench.activations import ROWS, collect
from phalanx.cli import app
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import CheckpointError
from phalanx.llm import LLM
from phalanx.models import read_config
from phalanx.quant import at_work
from phalanx.weights.balance import balanced, best_factors, pairs
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.quantize import quantize
from phalanx.weights.reader import SafetensorsReader
from tests.weights.conftest import Config, save_folder
from tests.weights.four_bit_files import awq
from tests.weights.test_quantize import ALIGNED, MODELS, made, silent

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 33, 7, 12, 60, 3]
ERRORS = {"awq": (0.05, 0.12), "w4a16": (0.05, 0.15), "mxfp4": (0.08, 0.16)}
"""Of normal weights, in groups of 128 and 32."""


def meant(folder: Path, name: str) -> Tensor:
    """A matrix of a written checkpoint, widened as Phalanx reads it."""
    reader = Checkpoint(folder).open_reader(torch.device("cpu"))
    shape = read_config(json.loads((folder / "config.json").read_text())).tensors[name].shape
    scheme, whole = reader.scheme_of(name), tuple(map(slice, [0] * len(shape), shape))
    assert scheme is not None
    return at_work(scheme).widen(reader.read_pieces(name, whole), whole)


def first_scores(folder: Path, **options: str) -> dict[int, float]:
    with LLM(folder, progress=False, max_model_len=64, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        (table,) = llm.generate(PROMPT, params).logprobs or []
    return dict(table.top)


@pytest.mark.parametrize("number_format", ["w4a16", "mxfp4"])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_transformers_reads_what_is_written(tmp_path: Path, name: str, number_format: str) -> None:
    """Linear layers by compressed-tensors, bit for bit, and the same logits."""
    output = tmp_path / "quantised"
    source = made(tmp_path / "plain", MODELS[name] | {"dtype": "bfloat16"})
    report = quantize(source, output, number_format, silent)
    low, high = ERRORS[number_format]
    assert all(low < error.relative < high for error in report.errors)
    dtype = torch.bfloat16 if number_format == "mxfp4" else torch.float32  # they widen MXFP4 to bf16 alone
    reference = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=dtype)
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    theirs = reference.model.layers[1].self_attn.q_proj.weight.detach()
    assert torch.equal(theirs, meant(output, "model.layers.1.self_attn.q_proj.weight").to(theirs.dtype))
    for token, score in first_scores(output, dtype="fp32").items():
        assert abs(float(wanted[token]) - score) < (0.1 if number_format == "mxfp4" else 0.02)


@pytest.mark.parametrize("number_format", list(ERRORS))
def test_it_computes_what_a_plain_checkpoint_of_the_same_numbers_does(tmp_path: Path, number_format: str) -> None:
    source, output = made(tmp_path / "plain", MODELS["dense"]), tmp_path / "quantised"
    quantize(source, output, number_format, silent)
    written, spec = SafetensorsReader(output), read_config(MODELS["dense"])
    tensors = {
        name: meant(output, name) if tensor.is_linear else written.read(name, tuple(map(slice, tensor.shape)))
        for name, tensor in spec.tensors.items()
    }
    plain = tmp_path / "widened"
    plain.mkdir()
    save_folder(plain, MODELS["dense"], tensors)
    assert first_scores(output, dtype="fp32") == first_scores(plain, dtype="fp32")


def test_awq_files_are_laid_out_as_autoawq_has_them(tmp_path: Path) -> None:
    """The plain writer of the tests, by AutoAWQ's own rules, makes the same words of the same codes."""
    source, output, name = (
        made(tmp_path / "plain", MODELS["dense"]),
        tmp_path / "quantised",
        "model.layers.0.mlp.up_proj",
    )
    quantize(source, output, "awq", silent)
    files = SafetensorsReader(output)
    rows, columns = read_config(MODELS["dense"]).tensors[f"{name}.weight"].shape
    stored, _ = awq(128).write(name, rows, columns, torch.Generator())
    for key, tensor in stored.items():
        assert files.shape(key) == tuple(tensor.shape)
        assert files.read(key, tuple(map(slice, tensor.shape))).dtype == tensor.dtype
    wide = SafetensorsReader(source).read(f"{name}.weight", (slice(rows), slice(columns)))
    assert float((meant(output, f"{name}.weight") - wide).norm() / wide.norm()) < ERRORS["awq"][1]


def test_scales_go_by_inputs_and_change_nothing_but_the_rounding(tmp_path: Path) -> None:
    """Some columns see inputs fifty times as large: their error shrinks, and the model is the same but for rounding."""
    source = made(tmp_path / "plain", MODELS["dense"])
    spec = read_config(MODELS["dense"])
    inputs = {name: torch.randn(64, tensor.shape[1]) for name, tensor in spec.tensors.items() if tensor.is_linear}
    for rows in inputs.values():
        rows[:, :8] *= 50
    plain, aware = (
        quantize(source, tmp_path / "a", "awq", silent),
        quantize(source, tmp_path / "b", "awq", silent, inputs),
    )
    name = "model.layers.0.mlp.down_proj.weight"
    wide = SafetensorsReader(source).read(name, (slice(128), slice(256)))
    factors = balanced(spec, SafetensorsReader(source), inputs, 128)[name].columns
    found = [meant(tmp_path / "a", name), meant(tmp_path / "b", name) / factors]
    loss = [float(((values - wide) @ inputs[name].t()).norm()) for values in found]
    assert loss[1] < 0.75 * loss[0]
    assert len(plain.errors) == len(aware.errors)
    before, after = first_scores(source, dtype="fp32"), first_scores(tmp_path / "b", dtype="fp32")
    common = before.keys() & after.keys()
    assert len(common) > 15
    assert max(abs(before[token] - after[token]) for token in common) < 0.5


def test_the_best_factors_are_never_worse_than_none() -> None:
    weight, given = torch.randn(64, 128), torch.randn(32, 128)
    assert torch.equal(best_factors(torch.ones(4, 128), given, 128), torch.ones(128))
    given[:, 5] *= 100
    assert best_factors(weight, given, 128)[5] > 2


def test_pairs_are_those_that_can_be_balanced() -> None:
    """v and o only where every query head has a KV head of its own; experts not at all."""
    alone = read_config(MODELS["dense"] | {"num_key_value_heads": 4})
    assert [pair.feeds.split(".")[-2] for pair in pairs(alone)][:4] == [
        "input_layernorm", "v_proj", "post_attention_layernorm", "up_proj",
    ]  # fmt: skip
    assert "v_proj" not in {pair.feeds.split(".")[-2] for pair in pairs(read_config(MODELS["dense"]))}
    assert {pair.feeds.split(".")[-2] for pair in pairs(read_config(MODELS["experts"]))} == {"input_layernorm"}


def test_what_layers_are_given_is_collected_from_the_models_own_text(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    inputs = collect(source, None)
    spec = read_config(MODELS["dense"])
    assert set(inputs) == {name for name, tensor in spec.tensors.items() if tensor.is_linear}
    for name, rows in inputs.items():
        assert rows.shape == (ROWS, spec.tensors[name].shape[1])


def test_columns_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    odd: Config = ALIGNED | {"model_type": "llama", "intermediate_size": 80}
    for number_format in ERRORS:
        with pytest.raises(CheckpointError, match=r"down_proj.weight has 80"):
            quantize(made(tmp_path / number_format, odd), tmp_path / "new", number_format, silent)


def test_the_command_writes_awq(tmp_path: Path) -> None:
    source = made(tmp_path / "plain", MODELS["dense"])
    ran = CliRunner().invoke(
        app, ["quantize", str(source), "--format", "awq", "--output", str(tmp_path / "new"), "--json"]
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["format"] == "awq"
    with LLM(tmp_path / "new", progress=False, max_model_len=64) as llm:
        assert len(llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4
