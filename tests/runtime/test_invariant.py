"""The same tokens and log-probabilities, bit for bit: at every TP, in every batch, however prompts are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from phalanx import LLM, SamplingParams
from phalanx.engine.speculation import Speculation
from phalanx.errors import ConfigError, LayoutError
from phalanx.fabric.group import Solo
from phalanx.kernels.gemm import skinny_gemm
from phalanx.kernels.invariant import tree_sum
from phalanx.kernels.panels import Panels
from phalanx.layers.ffn.dense import Mlp
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import place_of
from phalanx.spec.invariant import inner_units, invariant_layout
from phalanx.weights.checkpoint import Checkpoint
from tests.conftest import Reference
from tests.runtime.test_stored_on_cpu import folder_of, gguf_of
from tests.threaded_ranks import ThreadedEngine
from tests.weights.conftest import save_folder
from tests.weights.four_bit_files import FORMS
from tests.weights.test_formats import BASE, written

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
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


def always_drafting(engine: ThreadedEngine) -> Speculation:
    speculation = engine.engine.scheduler.speculation
    assert speculation is not None
    speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
    speculation.ahead = lambda requests: 3  # type: ignore[method-assign]
    speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
    return speculation


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


UNITS = {"llama": {"intermediate_size": 512}, "qwen3_moe": {"intermediate_size": 512, "moe_intermediate_size": 512}}
"""Eight, of whole groups."""
STORED = [[5, 7, 11, 13, 17, 19] * 6, [3], [40, 2, 33, 9, 21, 8, 30, 1, 12, 25, 44, 6]]


def panels_of(engine: ThreadedEngine) -> list[Panels]:
    """Of the products behind attention, and behind FFNs, on the first rank."""
    layers = engine.runner.ranks[0].model.layers
    found = [layer.mixer.output.product.weight for layer in layers]
    found += [weight for layer in layers for weight in products_behind(layer.ffn)]
    return [weight for weight in found if isinstance(weight, Panels)]


def products_behind(ffn: Any) -> list[Any]:
    return [ffn.down.product.weight] if isinstance(ffn, Mlp) else list(ffn.held.down.matrices)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [("llama", [Kind.Q4_1]), ("qwen3_moe", [Kind.Q4_0]), ("llama", [Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.Q5_0])],
    ids=["dense", "experts", "mixed"],
)
def test_weights_that_stay_in_few_bits_have_the_same_bits_at_every_tp(
    tmp_path: Path, model: str, kinds: list[Kind]
) -> None:
    """As above, with drafts, then from what is cached. One rank computes layers that are all panels in one call."""
    path = gguf_of(tmp_path, model, *kinds, **UNITS[model])
    lone = ThreadedEngine(path, 1, invariant=True, max_num_batched_tokens=160, max_num_seqs=1, prefix_caching=False)
    longer = msgspec.structs.replace(SCORED, max_tokens=4 * TOKENS)
    wanted = [told(lone, [prompt], longer)[0] for prompt in STORED]
    assert {weight.units for weight in panels_of(lone)} == {8}
    in_one_call = lone.runner.ranks[0].model.layers[0].whole is not None
    assert in_one_call == (model == "llama" and len(kinds) == 1)
    drafted = 0
    for tp, budget in ((1, 16), (2, 11), (4, 64), (8, 16)):
        engine = ThreadedEngine(path, tp, invariant=True, speculate="ngram", max_num_batched_tokens=budget)
        totals = always_drafting(engine).totals
        assert [told(engine, STORED, longer), told(engine, STORED, longer)] == [wanted, wanted]
        assert {weight.units for weight in panels_of(engine)} == {8 // tp}
        drafted += totals.draft_tokens
        engine.close()
    assert drafted > 4
    assert told(ThreadedEngine(path, 2), STORED, longer) != wanted


@pytest.mark.parametrize("form", FORMS)
def test_quantised_checkpoints_have_the_same_bits_at_every_tp(tmp_path: Path, form: str) -> None:
    """As they are stored where that is by whole numbers; otherwise widened."""
    check_at_four_ranks(folder_of(tmp_path, "llama", form, **UNITS["llama"]), in_panels="fp" not in form)


def test_shared_experts_may_stay_in_few_bits(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5}
    model = {"model_type": "glm4_moe", "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 2}
    config, stored, _ = written(BASE | model | experts | groups, "awq 32")
    check_at_four_ranks(save_folder(tmp_path, config, stored), in_panels=True)


def check_at_four_ranks(path: Path, in_panels: bool) -> None:
    lone = ThreadedEngine(path, 1, invariant=True, max_num_batched_tokens=160, max_num_seqs=1)
    wanted = [told(lone, [prompt], SCORED)[0] for prompt in STORED]
    assert bool(panels_of(lone)) == in_panels
    engine = ThreadedEngine(path, 4, invariant=True, max_num_batched_tokens=16)
    assert told(engine, STORED, SCORED) == wanted
    engine.close()


@pytest.mark.parametrize(("family", "drafted"), [("llama3_rope", "ngram"), ("glm4_moe", "mtp")])
def test_drafts_change_no_bit(family: str, drafted: str, references, heads) -> None:  # type: ignore[no-untyped-def]
    """Right ones and wrong ones, at two ranks, against no drafts at one; drawn tokens too. One has a shared expert."""
    folder = references(family).folder if drafted == "ngram" else heads(family).folder
    prompts = [[5, 9, 4] * 7, references(family).prompts[2]]
    plain = ThreadedEngine(folder, 1, invariant=True, max_num_batched_tokens=64)
    with_drafts = ThreadedEngine(folder, 2, invariant=True, speculate=drafted, max_num_batched_tokens=32)
    speculation = always_drafting(with_drafts)
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


def test_what_cannot_be_promised_is_refused_with_what_can(tiny_llama: Path, tmp_path: Path, references) -> None:  # type: ignore[no-untyped-def]
    spec = Checkpoint(references("qwen3_moe").folder).spec
    assert inner_units(spec) == 8
    with pytest.raises(LayoutError, match=r"TP=3.*TP 1, 2, 4, 8"):
        invariant_layout(spec, 3)
    stored = gguf_of(tmp_path, "llama", Kind.Q4_0)
    with pytest.raises(LayoutError, match=r"TP=8.*640 columns, of which 32 stay together.*TP 1, 2, 4\.") as refused:
        ThreadedEngine(stored, 8, invariant=True)
    assert "dtype fp32" in refused.value.fix
    ThreadedEngine(stored, 8, invariant=True, dtype="fp32")
    with pytest.raises(ConfigError, match="Mla layers"):
        invariant_layout(Checkpoint(references("deepseek_v3").folder).spec, 2)
    with pytest.raises(ConfigError, match="gate other than SiLU"):
        invariant_layout(Checkpoint(references("gemma3_text").folder).spec, 2)
    with pytest.raises(ConfigError, match="bfloat16"):
        LLM(tiny_llama, progress=False, invariant=True, dtype="bf16")
    quantised = Checkpoint(folder_of(tmp_path, "llama", "awq 64"))
    with pytest.raises(ConfigError, match=r"quantised weights \(awq\)"):
        place_of(EngineConfig(invariant=True), quantised.spec, Solo(), torch.device("cuda"), quantised.open_reader(CPU))
