"""Models whose weights stay as they are stored: on a CPU in panels, elsewhere by the definitions of a GPU's products.

Each says what the same checkpoint says with its weights widened, at one rank and at shares of three.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from phalanx import SamplingParams
from phalanx.errors import CheckpointError
from phalanx.fabric.group import Solo
from phalanx.kernels import cpu
from phalanx.kernels.gemm import PanelGemm
from phalanx.kernels.moe import PanelStack
from phalanx.kernels.panels import Panels
from phalanx.layers.decoder import Decoder
from phalanx.layers.ffn.experts import Experts
from phalanx.layers.place import Place
from phalanx.models import read_config
from phalanx.runtime import rank
from phalanx.runtime.config import EngineConfig
from phalanx.spec import Layout
from phalanx.weights.checkpoint import Checkpoint
from tests.threaded_ranks import ThreadedEngine
from tests.weights.conftest import Config, random_tensors, save_folder, write_gguf
from tests.weights.four_bit_files import FORMS
from tests.weights.test_formats import MODELS, written

needs_compiler = pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
PROMPTS = [[5, 7, 11, 13, 17, 19], [3], [40, 2, 33, 9, 21, 8, 30, 1, 12, 25, 44, 6]]
IN_PANELS = [name for name in FORMS if "fp4" not in name and name != "modelopt fp8"]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=8)
Answer = list[tuple[int, list[tuple[int, float]]]]


def folder_of(tmp_path: Path, model: str, form: str, **more: int) -> Path:
    """Two layers: what one leaves behind is what the other takes."""
    usual: Config = {"num_hidden_layers": 2} | ({"head_dim": 128} if form.startswith("fp8") else {})
    config, stored, _ = written(MODELS[model] | usual | more, form)
    return save_folder(tmp_path, config, stored)


def gguf_of(tmp_path: Path, model: str, *kinds: Kind, **more: int) -> Path:
    """Matrices of these kinds in turn, so that those of one product may differ."""
    config = MODELS[model] | {"num_hidden_layers": 2, "tie_word_embeddings": len(kinds) == 1} | more
    tensors = {name: values * 0.1 for name, values in random_tensors(read_config(config)).items()}
    leaves = ["attn_q", "attn_k", "attn_v", "attn_output"]
    ffn = ["gate", "up", "down"]
    leaves += [f"ffn_{name}" for name in ffn] if model == "llama" else [f"ffn_{name}_exps" for name in ffn]
    names = [f"blk.{layer}.{leaf}.weight" for layer in range(2) for leaf in leaves]
    stored = {name: kinds[number % len(kinds)] for number, name in enumerate([*names, "token_embd.weight"])}
    return write_gguf(tmp_path / "model.gguf", config, tensors, stored)


def said(path: Path, tp: int = 1, dtype: str = "auto") -> list[Answer]:
    """The tokens that follow each prompt, each with the likeliest ones in its place and their log-probabilities."""
    engine = ThreadedEngine(path, tp=tp, dtype=dtype, max_num_seqs=4, num_blocks=64, max_num_batched_tokens=16)
    requests = engine.generate(PROMPTS, GREEDY)
    engine.close()
    found: dict[int, Answer] = {request.id: [] for request in requests}
    for output in engine.outputs:
        assert output.logprobs is not None
        found[output.request_id].append((output.token, output.logprobs.top))
    return list(found.values())


def assert_same(found: list[Answer], wanted: list[Answer], noise: float = 6e-3) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        for (_, top), (_, other) in zip(ours, theirs, strict=True):
            common = dict(top).keys() & dict(other).keys()
            assert len(common) >= len(other) - 1
            assert max(abs(dict(top)[token] - dict(other)[token]) for token in common) < noise


@needs_compiler
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", IN_PANELS)
def test_weights_as_stored_say_what_widened_ones_say(tmp_path: Path, form: str, model: str) -> None:
    path = folder_of(tmp_path, model, form)
    wanted = said(path, dtype="fp32")
    for tp in (1, 3):
        assert_same(said(path, tp), wanted)


@needs_compiler
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_gguf_files_as_stored(tmp_path: Path, kind: Kind, model: str) -> None:
    path = gguf_of(tmp_path, model, kind)
    wanted = said(path, dtype="fp32")
    for tp in (1, 3):
        assert_same(said(path, tp), wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("form", "model", "scale", "where"),
    [
        ("w4a16", "llama", "layers.1.mlp.up_proj.weight_scale", r"layers\.1\.mlp\.gate_proj and .*up_proj"),
        ("gptq", "qwen3_moe", "layers.1.mlp.experts.2.up_proj.scales", "an expert of layer 1"),
    ],
)
def test_a_damaged_scale_is_refused_with_its_place(
    tmp_path: Path, form: str, model: str, scale: str, where: str
) -> None:
    config, stored, _ = written(MODELS[model] | {"num_hidden_layers": 2}, form)
    stored[f"model.{scale}"].view(-1)[3] = float("nan")
    with pytest.raises(CheckpointError, match=where):
        ThreadedEngine(save_folder(tmp_path, config, stored), 1, dtype="auto")


@needs_compiler
def test_kinds_may_differ_within_a_file(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, "llama", Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.Q5_0)
    assert_same(said(path), said(path, dtype="fp32"))


@needs_compiler
@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_layer_in_one_call_has_the_bits_of_its_parts(
    tmp_path: Path, kind: Kind, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, tokens and both in a step; in float32 a few tokens."""
    path, rows = gguf_of(tmp_path, "llama", kind), set()
    straight = cpu.call

    def call(name: str, *arguments: object) -> None:
        if name == "whole_layer":
            rows.add(arguments[-3])
        straight(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "call", call)
    found = said(path, dtype=dtype)
    assert rows >= ({3, 16} if dtype == "auto" else {3})
    rows.clear()
    monkeypatch.setattr("phalanx.layers.layer.whole_layer", lambda *parts: None)
    assert said(path, dtype=dtype) == found
    assert not rows


def loaded(path: Path, **options: str) -> Decoder:
    return rank.load_model(EngineConfig(device="cpu", **options), Checkpoint(path), Solo(), lambda done, total: None)


@needs_compiler
def test_what_is_kept_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 widens, and so does a machine without a compiler."""
    path = gguf_of(tmp_path, "qwen3_moe", Kind.Q4_1)
    kept = loaded(path)
    assert isinstance(kept.embedding.weight, Panels)
    assert kept.head.product.weight is kept.embedding.weight
    assert isinstance(kept.layers[0].mixer.qkv.product, PanelGemm)
    ffn = kept.layers[0].ffn
    assert isinstance(ffn, Experts)
    assert isinstance(ffn.held.gate_up, PanelStack)
    wide = loaded(path, dtype="fp32")
    assert isinstance(wide.embedding.weight, torch.Tensor)
    assert not any(isinstance(product, PanelGemm) for layer in wide.layers for product in layer.mixer.products())
    monkeypatch.setattr(rank.cpu, "library", lambda: None)
    assert isinstance(loaded(path).embedding.weight, torch.Tensor)


@pytest.mark.parametrize("form", ["awq 64", "gptq", "compressed nvfp4", "modelopt nvfp4", "compressed mxfp4", "w4a16"])
def test_what_a_gpu_holds_gives_the_tokens_of_the_widened_model(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the definitions of its products: a whole model, not layer by layer."""
    path = folder_of(tmp_path, "llama", form)
    wanted = said(path, dtype="fp32")
    monkeypatch.setattr(rank, "Place", HeldAsOnGpus)
    monkeypatch.setattr(Decoder, "lay_out", lambda model: None)
    assert_same(said(path), wanted, noise=1e-4)


class HeldAsOnGpus(Place):
    def __init__(self, layout: Layout, *arguments: object, **options: object) -> None:
        super().__init__(layout, *arguments, **(options | {"quantised": True, "in_panels": False}))  # type: ignore[arg-type]
