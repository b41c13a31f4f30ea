"""The same engine on a GPU: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.kernels.fp8 import quantise_blocks
from phalanx.models import read_config
from phalanx.runtime import graphs
from phalanx.runtime.prompt_graphs import PromptGraphs
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import NEW_TOKENS, Reference
from tests.runtime.test_fp8_cache import NAMES, some_prompts, with_scales
from tests.weights.conftest import COMMON, Config, save_folder

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TIGHT = {"max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 40, "max_model_len": 160, "max_num_seqs": 6}


def test_greedy_tokens_on_a_gpu_equal_transformers(reference: Reference) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    windows = len(Checkpoint(reference.folder).spec.window_groups)
    limits = TIGHT | {"num_blocks": 40 + windows * 20}
    with LLM(reference.folder, progress=False, device="cuda", dtype="fp32", **limits) as llm:
        answers = llm.generate(reference.prompts, greedy)
    for prompt, answer in zip(reference.prompts, answers, strict=True):
        assert reference.confirms(prompt, answer.token_ids)


def test_seeded_sampling_works_on_a_gpu(captured: Reference) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=16, logprobs=2)
    penalties = SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0}, max_tokens=8)
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **TIGHT) as llm:
        first, second = (llm.generate(captured.prompts[2], params).token_ids for _ in range(2))
        assert first == second
        assert len(llm.generate(captured.prompts, penalties)) == len(captured.prompts)


def test_many_sequences_of_many_lengths_run_in_padded_graphs(captured: Reference) -> None:
    """Batches between the captured sizes, shrinking as requests end, beside sampled ones: tokens as when alone."""
    lengths = (26, 7, 40, 15, 32, 3, 20)
    greedy = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in lengths]
    noise = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    limits = {"max_model_len": 160, "max_num_seqs": 24, "num_blocks": 400}
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **limits) as llm:
        answers = llm.generate(captured.prompts * 2, greedy + [noise] * len(captured.prompts))
    for answer, wanted, length in zip(answers, captured.continuations, lengths, strict=False):
        assert answer.token_ids == wanted[:length]


def test_batches_of_uneven_lengths_give_the_same_tokens(captured: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence in as many parts as can be, most of them empty."""
    monkeypatch.setattr(graphs, "is_uneven", lambda lengths, kv_heads: True)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(captured.folder, progress=False, device="cuda", dtype="fp32", **TIGHT) as llm:
        answers = llm.generate(captured.prompts, greedy)
    assert [answer.token_ids for answer in answers] == captured.continuations


FP8: Config = COMMON | {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
EXPERTS: Config = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 200, "norm_topk_prob": True}
FAMILIES = {"llama": {"model_type": "llama"}, "qwen3_moe": {"model_type": "qwen3_moe"} | EXPERTS}


@pytest.fixture(params=FAMILIES)
def fp8_checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny checkpoint with its linear layers in block FP8, one dimension ending within a tile."""
    config = FP8 | FAMILIES[request.param]
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for name, tensor in read_config(config).tensors.items():
        values = torch.randn(tensor.shape, generator=random) * 0.15 + (1 if len(tensor.shape) == 1 else 0)
        if tensor.is_linear:
            values, tensors[f"{name}_scale_inv"] = quantise_blocks(values)
        tensors[name] = values.contiguous()
    return save_folder(tmp_path, config, tensors)


def test_fp8_weights_on_a_gpu_give_the_tokens_of_the_cpu(fp8_checkpoint: Path) -> None:
    prompts = [[7], [3, 5, 8, 13, 21], [*range(40)], [11, 4] * 60]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    tokens = []
    for device in ("cpu", "cuda"):
        with LLM(fp8_checkpoint, progress=False, device=device, dtype="fp32", **TIGHT) as llm:
            tokens.append([answer.token_ids for answer in llm.generate(prompts, greedy)])
    assert tokens[0] == tokens[1]


def test_fp8_activations_stay_close_to_the_wide_ones(fp8_checkpoint: Path) -> None:
    """In half precision activations are FP8 too: probabilities move, by more where another expert is chosen for it."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    prompts = [[3, 5, 8, 13, 21], [*range(40)], [11, 4] * 60]
    found = []
    for dtype in ("fp32", "bf16"):
        with LLM(fp8_checkpoint, progress=False, device="cuda", dtype=dtype, **TIGHT) as llm:
            answers = llm.generate(prompts, params)
            found.append([answer.logprobs[0].sampled for answer in answers if answer.logprobs])
    assert found[1] == pytest.approx(found[0], abs=1.0)


def test_an_fp8_cache_on_a_gpu_gives_the_tokens_of_the_cpu(tiny_llama: Path, tmp_path: Path) -> None:
    """Twice, so that a warm cache counts too. One answer may go another way where a last bit decides on rounding."""
    checkpoint = with_scales(tiny_llama, tmp_path, NAMES[0])
    greedy, tokens = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for device in ("cpu", "cuda"):
        with LLM(checkpoint, progress=False, device=device, dtype="fp32", kv_cache_dtype="fp8", **TIGHT) as llm:
            answers = [answer for _ in range(2) for answer in llm.generate(some_prompts(512), greedy)]
            tokens.append([answer.token_ids for answer in answers])
    equal = [ours == wanted for wanted, ours in zip(*tokens, strict=True)]
    assert sum(equal) >= len(equal) - 2


def test_fp8_prompts_launched_kernel_by_kernel_stay_close_to_those_in_graphs(
    fp8_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are padded to other sizes, for which other products are chosen."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    prompts = [[3, 5, 8, 13, 21], [*range(40)], [11, 4] * 60]
    found = []
    for way in ("graphs", "launches"):
        if way == "launches":
            monkeypatch.setattr(PromptGraphs, "take", lambda *_: False)
        with LLM(fp8_checkpoint, progress=False, device="cuda", dtype="bf16", max_model_len=160, num_blocks=400) as llm:
            answers = llm.generate(prompts, params)
            found.append([answer.logprobs[0].sampled for answer in answers if answer.logprobs])
    assert found[1] == pytest.approx(found[0], abs=1.0)
