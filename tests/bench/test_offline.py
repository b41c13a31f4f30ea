"""Cases, and the least work they need, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.bench.ceilings import Ceilings, _product
from phalanx.bench.offline import least_work
from phalanx.bench.timing import FixedBatch
from phalanx.cost.work import RankWork, count_work
from phalanx.errors import ConfigError
from phalanx.kernels import cpu
from phalanx.models import read_config
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import held_weights
from phalanx.spec import ModelSpec
from phalanx.spec.schemes import DEFAULTS, Scheme, gguf
from phalanx.weights.checkpoint import Checkpoint

FP8 = DEFAULTS["fp8"]
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("text", ["8x16", "0x1x2", "1x1x1", "axbxc", "1x2x3x4", ""])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="BATCHxINPUTxOUTPUT"):
        FixedBatch.parse(text)


def work_of(spec: ModelSpec, weights: str = "bf16", cache: str = "bf16", tp: int = 1) -> RankWork:
    return count_work(spec, tp, weights, cache)


def test_a_decode_step_reads_the_weights_and_the_cached_tokens() -> None:
    """Per layer: q 64, k and v 32 each, o 64, MLP 3 x 128, norms 16; then a norm of 8 and a head of 800."""
    spec = read_config(SHAPE | {"model_type": "llama"})
    matrices = 2 * (64 + 32 + 32 + 64 + 3 * 128) + 800
    norms = 2 * 16 + 8
    step = FixedBatch.parse("3x10x4").decode_step
    cached = 3 * 12 * 2 * (2 * 2 * 2)
    assert work_of(spec).bytes_of(step) == (matrices + norms + cached) * 2
    attention = 4 * 2 * 12 * 8
    assert work_of(spec).flops_of(step) == 3 * (2 * matrices + attention)
    larger_share = work_of(spec, tp=2)
    assert work_of(spec).flops_of(step) / 2 <= larger_share.flops_of(step) < work_of(spec).flops_of(step)


def test_only_the_last_token_of_a_prompt_passes_what_is_behind_the_last_attention() -> None:
    spec = read_config(SHAPE | {"model_type": "llama"})
    layers = 2 * 2 * (64 + 32 + 32 + 64 + 3 * 128) + 4 * 2 * 5 * 8
    behind = 2 * (64 + 3 * 128)
    assert work_of(spec).flops_of(FixedBatch.parse("2x9x2").prompts) == 2 * (9 * (layers - behind) + behind + 1600)


def test_of_the_last_experts_too_only_the_last_token_passes_those_it_is_routed_to() -> None:
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    routed = work_of(read_config(SHAPE | {"model_type": "mixtral"} | moe))
    dense = work_of(read_config(SHAPE | {"model_type": "llama"}))
    router = 8 * 4
    assert routed.last_flops - dense.last_flops == 2 * (router + 3 * 128)


def test_of_the_experts_only_those_in_use_are_read() -> None:
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    work = work_of(read_config(SHAPE | {"model_type": "mixtral"} | moe))
    one, many = (work.bytes_of(FixedBatch.parse(case).decode_step) for case in ("1x2x2", "200x2x2"))
    experts = 2 * 4 * 3 * 128
    cached_for_one = 3 * 2 * 8
    assert many - one == pytest.approx(2 * (experts / 2 + 199 * cached_for_one))


def test_weights_held_in_fp8_are_read_as_such() -> None:
    """The linear layers a byte an element and 4 for each tile, the norms and the head two bytes."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    spec = read_config(SHAPE | {"model_type": "llama", "head_dim": 2} | quantised)
    step = FixedBatch.parse("1x2x2").decode_step
    narrow = work_of(spec, weights="fp8").bytes_of(step)
    assert work_of(spec).bytes_of(step) - narrow == 2 * (64 + 32 + 32 + 64 + 3 * 128) - 2 * 7 * 4


def test_keys_and_values_held_in_fp8_are_read_as_such() -> None:
    spec = read_config(SHAPE | {"model_type": "llama", "head_dim": 2})
    step = FixedBatch.parse("5x6x4").decode_step
    narrow = work_of(spec, cache="fp8").bytes_of(step)
    assert work_of(spec).bytes_of(step) - narrow == 5 * (6 + 2) * 2 * 2 * 2 * 2


def least(folder: Path, config: dict[str, object], device: str, all_ranks: bool = False, **asked: object) -> RankWork:
    (folder / "config.json").write_text(json.dumps(config))
    engine, source, place = EngineConfig(**asked), Checkpoint(folder, "dummy"), torch.device(device)  # type: ignore[arg-type]
    return least_work(source.spec, held_weights(engine, source, place, all_ranks), engine, place)


def test_a_device_is_held_against_what_it_holds(tmp_path: Path) -> None:
    """On CPUs and GPUs the checkpoint's FP8, or the dtype; a share for each rank, or one machine for all of them."""
    shape = SHAPE | {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 512, "intermediate_size": 1024}
    quantised = shape | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    spec, plain = read_config(quantised), read_config(shape)
    step = FixedBatch.parse("3x10x4").decode_step
    assert least(tmp_path, quantised, "cuda") == work_of(spec, "fp8")
    assert least(tmp_path, quantised, "cuda", tp=2) == work_of(spec, "fp8", tp=2)
    on_cpus = least(tmp_path, quantised, "cpu")
    assert on_cpus.flops_of(step) == work_of(spec, "fp8").flops_of(step)
    in_float32 = 4 * spec.vocab * spec.hidden + 4 * (2 * 2 + 1) * spec.hidden + 4 * 3 * 12 * 2 * 2 * 2 * 128
    tiles = 2 * (4 * 4 + 2 * 2 * 4 + 4 * 4 + 3 * 8 * 4) * (128 * 128 + 4)
    assert on_cpus.bytes_of(step) == pytest.approx(in_float32 + tiles, rel=1e-3)
    widened = least(tmp_path, quantised, "cpu", dtype="fp32")
    assert widened.bytes_of(step) == work_of(spec, "fp32", "fp32").bytes_of(step)
    assert least(tmp_path, shape, "cuda", tp=2, kv_cache_dtype="fp8") == work_of(plain, cache="fp8", tp=2)
    halves = least(tmp_path, shape, "cpu", all_ranks=True, tp=2, dtype="half")
    norms = 2 * (2 * 2 + 1) * plain.hidden
    assert halves.bytes_of(step) == work_of(plain, "fp16", "fp16").bytes_of(step) + norms
    assert halves.flops_of(step) == work_of(plain, "fp16", "fp16").flops_of(step)


def test_the_limit_is_whichever_takes_longer() -> None:
    ceilings = Ceilings("a machine", bytes_per_s=10.0, flops_per_s=100.0)
    assert ceilings.seconds(20, 100) == 2.0
    assert ceilings.seconds(20, 1000) == 10.0


@pytest.mark.parametrize(
    ("scheme", "called"), [(None, set()), (gguf("q4_1"), {"panel_product"}), (FP8, {"widen_e4m3"})]
)
def test_the_product_that_sets_the_limit_is_that_of_the_weights_that_are_held(
    scheme: Scheme | None, called: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.library() is None:
        pytest.skip("no C compiler here")
    seen, straight = set[str](), cpu.call

    def call(name: str, *arguments: object) -> None:
        seen.add(name)
        straight(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "call", call)
    left, right = torch.randn(64, 256), torch.randn(256, 256)
    found = _product(left, right, scheme)()
    assert isinstance(found, torch.Tensor)
    assert found.isfinite().all()
    assert seen == called
