"""The same tokens and log-probabilities, bit for bit: at every TP, in every batch, however prompts are cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.errors import ConfigError, LayoutError
from phalanx.kernels.gemm import skinny_gemm
from phalanx.kernels.invariant import tree_sum
from phalanx.spec.invariant import inner_units, invariant_layout
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import Reference
from tests.threaded_ranks import ThreadedEngine

pytestmark = pytest.mark.slow

TOKENS = 4
SCORED = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
DRAWN = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=5, seed=11)


@pytest.mark.parametrize("k", [160, 72, 1, 50])
def test_a_product_has_the_same_bits_in_any_company(k: int) -> None:
    """Other rows, other columns; and units apart, added up as a tree."""
    x, weight, bias = torch.randn(70, k), torch.randn(37, k), torch.randn(37)
    whole = skinny_gemm(x, weight, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))
    for rows in (slice(3, 4), slice(1, 8), slice(5, 70)):
        for columns in (slice(0, 37), slice(4, 5), slice(2, 9)):
            assert torch.equal(skinny_gemm(x[rows], weight[columns], bias[columns]), whole[rows, columns])
    units = 8 if k % 8 == 0 else 1
    tree = skinny_gemm(x, weight, bias, units)
    leaves = [
        skinny_gemm(x[:, at : at + k // units], weight[:, at : at + k // units], bias if at == 0 else None)
        for at in range(0, k, k // units)
    ]
    assert torch.equal(tree_sum(leaves), tree)
    if units > 1:
        assert not torch.equal(tree, whole)


def told(engine: ThreadedEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[object]]:
    """Of each prompt its tokens and their log-probabilities."""
    engine.outputs.clear()
    requests = engine.generate(prompts, params)
    return [
        [(output.token, output.logprobs) for output in engine.outputs if output.request_id == request.id]
        for request in requests
    ]


@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_moe"])
def test_answers_have_the_same_bits_at_every_tp(family: str, references) -> None:  # type: ignore[no-untyped-def]
    """Each prompt alone at TP 1, uncut, against all together at TP 1, 2 and 4, cut into chunks of all sizes."""
    reference: Reference = references(family)
    prompts = [reference.prompts[index] for index in (2, -2, -1)]
    lone = ThreadedEngine(reference.folder, 1, invariant=True, max_num_batched_tokens=160, max_num_seqs=1)
    scored, drawn = ([told(lone, [prompt], params)[0] for prompt in prompts] for params in (SCORED, DRAWN))
    assert [token for token, _ in scored[0]] == reference.continuations[2][:TOKENS]  # type: ignore[misc]
    for tp, budget, params, wanted in ((1, 32, SCORED, scored), (2, 17, DRAWN, drawn), (4, 64, SCORED, scored)):
        engine = ThreadedEngine(reference.folder, tp, invariant=True, max_num_batched_tokens=budget)
        assert told(engine, prompts, params) == wanted
        engine.close()
    assert told(ThreadedEngine(reference.folder, 2), prompts, SCORED) != scored


@pytest.mark.parametrize(("family", "drafted"), [("llama3_rope", "ngram"), ("glm4_moe", "mtp")])
def test_drafts_change_no_bit(family: str, drafted: str, references, heads) -> None:  # type: ignore[no-untyped-def]
    """Right ones and wrong ones, at two ranks, against no drafts at one; drawn tokens too. One has a shared expert."""
    folder = references(family).folder if drafted == "ngram" else heads(family).folder
    prompts = [[5, 9, 4] * 7, references(family).prompts[2]]
    plain = ThreadedEngine(folder, 1, invariant=True, max_num_batched_tokens=64)
    with_drafts = ThreadedEngine(folder, 2, invariant=True, speculate=drafted, max_num_batched_tokens=32)
    speculation = with_drafts.engine.scheduler.speculation
    assert speculation is not None
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation.ahead = lambda requests: 3  # type: ignore[method-assign]
    for params in (SCORED, DRAWN):
        longer = msgspec.structs.replace(params, max_tokens=3 * TOKENS)
        assert told(with_drafts, prompts, longer) == told(plain, prompts, longer)
    assert speculation.totals.draft_tokens > 4
    with_drafts.close()


@pytest.mark.usefixtures("forked_ranks")
def test_eight_ranks_have_the_bits_of_one(references) -> None:  # type: ignore[no-untyped-def]
    reference: Reference = references("llama3_rope")
    scores = []
    for tp in (1, 8):
        with LLM(reference.folder, tp=tp, progress=False, invariant=True, max_model_len=160) as llm:
            answers = llm.generate(reference.prompts[1:4], SCORED)
        scores.append([(answer.token_ids, answer.logprobs) for answer in answers])
    assert scores[0] == scores[1]


def test_what_cannot_be_promised_is_refused_with_what_can(tiny_llama: Path, references) -> None:  # type: ignore[no-untyped-def]
    spec = Checkpoint(references("qwen3_moe").folder).spec
    assert inner_units(spec) == 8
    with pytest.raises(LayoutError, match=r"TP=3.*TP 1, 2, 4, 8"):
        invariant_layout(spec, 3)
    with pytest.raises(ConfigError, match="Mla layers"):
        invariant_layout(Checkpoint(references("deepseek_v3").folder).spec, 2)
    with pytest.raises(ConfigError, match="gate other than SiLU"):
        invariant_layout(Checkpoint(references("gemma3_text").folder).spec, 2)
    with pytest.raises(ConfigError, match="bfloat16"):
        LLM(tiny_llama, progress=False, invariant=True, dtype="bf16")
