"""Models with latent or compressed attention in the graphs of a GPU: run with `pytest -m cuda` where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.runtime.graphs import DecodeGraphs
from phalanx.runtime.prompt_graphs import PromptGraphs
from tests.conftest import Reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FAMILIES = ["glm4_moe_lite", "deepseek_v3", "kimi_like", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"]
LIMITS = {"max_model_len": 160, "max_num_seqs": 24, "num_blocks": 400}


@pytest.fixture(params=FAMILIES)
def latent(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def counted(monkeypatch: pytest.MonkeyPatch, graphs: type[DecodeGraphs] | type[PromptGraphs]) -> list[int]:
    """The sizes of the steps that these graphs run."""
    sizes: list[int] = []
    run = graphs.run

    def noted(self: DecodeGraphs, plan: object, rows: object, news: object) -> object:
        sizes.append(plan.num_tokens)  # type: ignore[attr-defined]
        return run(self, plan, rows, news)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "run", noted)
    return sizes


@pytest.mark.parametrize("budget", [16, 512])
def test_graphs_give_the_tokens_of_transformers(
    latent: Reference, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of many lengths, prompts whole and cut at odd places, and a second time from the prefix cache."""
    decodes, prompts = counted(monkeypatch, DecodeGraphs), counted(monkeypatch, PromptGraphs)
    greedy = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count, _ in zip((40, 7, 64, 23, 50, 3, 31), latent.prompts, strict=False)
    ]
    limits = LIMITS | {"max_num_batched_tokens": budget}
    with LLM(latent.folder, progress=False, device="cuda", dtype="fp32", **limits) as llm:
        answers = [llm.generate(latent.prompts, greedy) for _ in range(2)]
    for again in answers:
        for prompt, answer in zip(latent.prompts, again, strict=True):
            assert latent.confirms(prompt, answer.token_ids)
    assert len(set(decodes)) > 1
    assert prompts


def test_half_precision_stays_close(latent: Reference) -> None:
    """The kernels of tensor cores, with sizes that fill no tile."""
    params, found = SamplingParams(temperature=0, max_tokens=1, logprobs=1), []
    for dtype in ("fp32", "bf16"):
        with LLM(latent.folder, progress=False, device="cuda", dtype=dtype, **LIMITS) as llm:
            answers = llm.generate(latent.prompts, params)
            found.append([answer.logprobs[0].sampled for answer in answers if answer.logprobs])
    assert found[1] == pytest.approx(found[0], abs=1.0)
