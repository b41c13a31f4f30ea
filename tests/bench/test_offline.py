"""Cases, and the least work they need, by hand."""

from __future__ import annotations

import pytest
import torch

from phalanx.bench.ceilings import Ceilings
from phalanx.bench.offline import least_work
from phalanx.bench.timing import FixedBatch
from phalanx.cost.work import RankWork, count_work
from phalanx.errors import ConfigError
from phalanx.models import read_config
from phalanx.runtime.config import EngineConfig
from phalanx.spec import ModelSpec

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


def test_a_device_is_held_against_what_it_holds() -> None:
    """On CPUs float32, and one machine for all ranks; on GPUs the checkpoint's FP8 or dtype, and a share for each."""
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    spec = read_config(SHAPE | {"model_type": "llama", "dtype": "bfloat16"} | quantised)
    assert least_work(spec, EngineConfig(), gpu) == work_of(spec, "fp8")
    assert least_work(spec, EngineConfig(), cpu) == work_of(spec, "fp32", "fp32")
    plain = read_config(SHAPE | {"model_type": "llama", "dtype": "bfloat16"})
    assert least_work(plain, EngineConfig(tp=2, kv_cache_dtype="fp8"), gpu) == work_of(plain, cache="fp8", tp=2)
    assert least_work(plain, EngineConfig(tp=2, dtype="half"), cpu) == work_of(plain, "fp16", "fp16")


def test_the_limit_is_whichever_takes_longer() -> None:
    ceilings = Ceilings("a machine", bytes_per_s=10.0, flops_per_s=100.0)
    assert ceilings.seconds(20, 100) == 2.0
    assert ceilings.seconds(20, 1000) == 10.0
