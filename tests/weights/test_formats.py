"""Every quantised format: what a rank holds is a plain dequantisation of its part, bit for bit, at any TP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ModelError
from phalanx.fabric.group import GlooGroup
from phalanx.layers.decoder import Decoder
from phalanx.layers.place import Place
from phalanx.models import read_config
from phalanx.quant import at_work
from phalanx.spec import Layout
from phalanx.weights.checkpoint import Checkpoint
from phalanx.weights.load import check_tensors, load_weights
from tests.weights.conftest import COMMON, Config, Tensors, random_tensors, save_folder
from tests.weights.four_bit_files import FORMS, awq, gptq, packed_experts

BASE: Config = COMMON | {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 8, "vocab_size": 48}
MODELS: dict[str, Config] = {
    "llama": BASE | {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 640},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
    },
}


DOWN = "model.layers.0.mlp.down_proj"


def written(config: Config, form: str) -> tuple[Config, Tensors, Tensors]:
    """A checkpoint with all linear layers but those that are left out in a format, and what it means."""
    told, write = FORMS[form]
    config = config | {"quantization_config": told}
    spec, random = read_config(config), torch.Generator().manual_seed(1)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, values in random_tensors(spec).items():
        tensor = spec.tensors[name]
        if tensor.is_linear and "o_proj" not in name:
            files, meant[name] = write(name.removesuffix(".weight"), *tensor.shape, random)
            stored |= {key: part.contiguous() for key, part in files.items()}
        else:
            stored[name] = meant[name] = values
    return config, stored, meant


def share(checkpoint: Checkpoint, rank: int, size: int, quantised: bool) -> Decoder:
    layout = Layout(checkpoint.spec, size)
    group, device = GlooGroup(rank, size), torch.device("cpu")
    model = Decoder(Place(layout, group, torch.float32, device, quantised=quantised))
    reader = checkpoint.open_reader(device)
    load_weights(model, reader, lambda done, total: None)
    reader.close()
    return model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_every_part_is_a_plain_dequantisation(tmp_path: Path, form: str, model: str) -> None:
    more = {"head_dim": 128} if form.startswith("fp8") else {}
    config, stored, meant = written(MODELS[model] | more, form)
    checkpoint = Checkpoint(save_folder(tmp_path, config, stored))
    for quantised in (False, True):
        check_parts(checkpoint, meant, form, quantised)


def check_parts(checkpoint: Checkpoint, meant: Tensors, form: str, quantised: bool) -> None:
    """Widened or as stored, whole and in three parts that are not alike."""
    covered = dict.fromkeys(meant, 0)
    held_quantised = 0
    for size in (1, 3):
        for rank in range(size):
            for name, part in share(checkpoint, rank, size, quantised).parts():
                wide = part if isinstance(part, Tensor) else part.dequantised(torch.float32)
                held_quantised += not isinstance(part, Tensor)
                wanted = meant[name][Layout(checkpoint.spec, size).slices(checkpoint.spec.tensors[name], rank)]
                if quantised and form == "compressed nvfp4":  # held is one over what scales are divided by
                    torch.testing.assert_close(wide, wanted, rtol=3e-7, atol=0)
                else:
                    assert torch.equal(wide, wanted), name
                covered[name] += part.numel()
    assert all(covered[name] >= 2 * values.numel() for name, values in meant.items())
    assert (held_quantised > 0) == quantised


@pytest.mark.parametrize("form", FORMS)
def test_a_part_may_begin_within_a_word_or_a_group(tmp_path: Path, form: str) -> None:
    config, stored, meant = written(MODELS["llama"], form)
    checkpoint, name = Checkpoint(save_folder(tmp_path, config, stored)), f"{DOWN}.weight"
    reader = checkpoint.open_reader(torch.device("cpu"))
    scheme, slices = reader.scheme_of(name), (slice(13, 101), slice(70, 333))
    assert scheme is not None
    assert torch.equal(at_work(scheme).widen(reader.read_pieces(name, slices), slices), meant[name][slices])
    reader.close()


def test_experts_of_gpt_oss_are_dealt_by_blocks(tmp_path: Path) -> None:
    """Five blocks of 32 inner columns: rows of gate and up alternate, ranks have two, two and one."""
    config = BASE | {
        "model_type": "gpt_oss",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 160,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }
    spec, random = read_config(config), torch.Generator().manual_seed(2)
    path = "model.layers.0.mlp.experts."
    stored = {name: values for name, values in random_tensors(spec).items() if ".experts." not in name}
    gate_up, wide_gate_up = packed_experts(f"{path}gate_up_proj", 3, 320, 128, random)
    down, wide_down = packed_experts(f"{path}down_proj", 3, 128, 160, random)
    biases = {f"{path}gate_up_proj_bias": torch.randn(3, 320), f"{path}down_proj_bias": torch.randn(3, 128)}
    folder = save_folder(tmp_path, config, stored | gate_up | down | biases)
    shares = [[0, 64, 128, 160], [64, 64, 32]]
    for quantised in (False, True):
        for rank in range(3):
            model = share(Checkpoint(folder), rank, 3, quantised)
            mine = slice(shares[0][rank], shares[0][rank + 1])
            for name, part in model.parts():
                if ".experts." not in name or name.endswith("bias"):
                    continue
                assert isinstance(part, Tensor) != quantised
                wide = part if isinstance(part, Tensor) else part.dequantised(torch.float32)
                expert, kind = int(name.split(".")[5]), name.split(".")[6]
                if kind == "down_proj":
                    assert torch.equal(wide, wide_down[expert][:, mine])
                else:
                    assert torch.equal(wide, wide_gate_up[expert][(kind == "up_proj") :: 2][mine])


def test_deepseek_v4_as_it_is_published(tmp_path: Path) -> None:
    """Experts as I8 pairs of e2m1 with E8M0 scales, other matrices in FP8 by tiles, the compressor wide."""
    from tests.weights.v4_files import published

    config, stored, meant = published()
    checkpoint = Checkpoint(save_folder(tmp_path, config, stored))
    for quantised in (False, True):
        for size in (1, 2):
            for rank in range(size):
                kept = set()
                for name, part in share(checkpoint, rank, size, quantised).parts():
                    wide = part if isinstance(part, Tensor) else part.dequantised(torch.float32)
                    kept |= set() if isinstance(part, Tensor) else {type(part).__name__}
                    slices = Layout(checkpoint.spec, size).slices(checkpoint.spec.tensors[name], rank)
                    assert torch.equal(wide, meant[name][slices]), name
                assert kept == ({"FourBitWeight", "Fp8Weight"} if quantised else set())


def _wider(stored: Tensors) -> None:
    for ending in ("qweight", "qzeros", "scales"):
        del stored[f"{DOWN}.{ending}"]
    stored[f"{DOWN}.weight"] = torch.zeros(128, 640)


FAULTS: dict[str, tuple[str, Callable[[Tensors], Any], str, str]] = {
    "no scales": ("awq 64", lambda s: s.pop(f"{DOWN}.scales"), "missing_tensor", rf"{DOWN}\.scales"),
    "another group": (
        "awq 64",
        lambda s: s.update({f"{DOWN}.scales": s[f"{DOWN}.scales"][::2].clone()}),
        "misshapen_tensor",
        r"\[5, 128\].* awq with groups of 64 makes it \[10, 128\]",
    ),
    "a packed width": (
        "w4a16",
        lambda s: s.update({f"{DOWN}.weight_packed": s[f"{DOWN}.weight_packed"][:, :79].clone()}),
        "misshapen_tensor",
        r"\[128, 79\].* makes it \[128, 80\]",
    ),
    "a zero point of 16": (
        "gptq",
        lambda s: s[f"{DOWN}.qzeros"].fill_(-1),
        "bad_values",
        "a zero point of 16, where four bits have 0 to 15",
    ),
    "inputs in another order": (
        "gptq",
        lambda s: s.update({f"{DOWN}.g_idx": s[f"{DOWN}.g_idx"].flip(0).contiguous()}),
        "bad_values",
        r"act-order.*\[9, 9, 9, 9\]",
    ),
    "another dtype": (
        "awq 64",
        lambda s: s.update({f"{DOWN}.qweight": s[f"{DOWN}.qweight"].long()}),
        "wrong_dtype",
        "stored as I64, where awq has I32",
    ),
    "a module that is not quantised": ("awq 64", _wider, "stored_wider", f"{DOWN}.weight is not quantised"),
    "no factor": (
        "modelopt nvfp4",
        lambda s: s.pop(f"{DOWN}.weight_scale_2"),
        "missing_tensor",
        r"down_proj\.weight_scale_2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_fit_its_format_is_refused_with_the_numbers(tmp_path: Path, fault: str) -> None:
    """By the check that comes before a rank takes memory."""
    form, spoil, code, words = FAULTS[fault]
    config, stored, _ = written(MODELS["llama"], form)
    spoil(stored)
    checkpoint = Checkpoint(save_folder(tmp_path, config, stored))
    reader = checkpoint.open_reader(torch.device("cpu"))
    with pytest.raises(CheckpointError, match=words) as refused:
        check_tensors(Layout(checkpoint.spec, 2), reader, 1)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (awq(128).told | {"version": "gemv"}, "version is 'gemv'"),
        (awq(128).told | {"group_size": 48}, "group_size is 48, no multiple of 32"),
        (gptq(128).told | {"desc_act": True}, "desc_act is true"),
        (gptq(128).told | {"checkpoint_format": "marlin"}, "its format is 'marlin'"),
        (FORMS["w4a16"].told | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (
            FORMS["w4a16"].told | {"config_groups": FORMS["w4a16"].told["config_groups"] | {"group_1": {}}},
            "config_groups has 2 members",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_its_configuration(told: Config, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_config(MODELS["llama"] | {"quantization_config": told})


@pytest.mark.parametrize("form", ["awq 128", "w4a16", "compressed mxfp4", "modelopt nvfp4"])
def test_random_weights_are_rounded(form: str, tmp_path: Path) -> None:
    """For benchmarks."""
    config = MODELS["llama"] | {"quantization_config": FORMS[form].told}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path, "dummy")
    reader = checkpoint.open_reader(torch.device("cpu"))
    part = dict(share(checkpoint, 0, 1, quantised=True).parts())[f"{DOWN}.weight"]
    assert not isinstance(part, Tensor)
    wide = reader.read(f"{DOWN}.weight", (slice(0, 128), slice(0, 640)))
    error = (part.dequantised(torch.float32) - wide).norm() / wide.norm()
    assert 0.05 < error < 0.15
    assert part.nbytes < 0.32 * wide.numel() * 2
