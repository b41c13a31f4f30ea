"""On a GPU, where steps are graphs and two are in flight, drafts change no token either."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.engine.speculation import Drafter, RankDrafter, Speculation
from tests.conftest import Reference
from tests.drafts import Known, Rememberer
from tests.heads import HeadReference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
LIMITS = {"max_num_batched_tokens": 64, "block_size": 8, "num_blocks": 240, "max_model_len": 200, "max_num_seqs": 32}
WAYS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
]


@pytest.mark.parametrize(
    ("name", "speculate"), [("qwen3_5_text", "mtp"), ("deepseek_v3", "mtp"), ("llama3_rope", "ngram")]
)
@pytest.mark.parametrize("way", WAYS, ids=["greedy", "seeded"])
def test_tokens_are_the_same_with_drafts_and_without(
    name: str,
    speculate: str,
    way: SamplingParams,
    references: Callable[[str], Reference],
    heads: Callable[[str], HeadReference],
) -> None:
    """By the drafter that is asked for, and by one that is right two times of three."""
    folder = heads(name).folder if speculate == "mtp" else references(name).folder
    prompts = [prompt * 2 for prompt in references(name).prompts]
    with LLM(folder, progress=False, device=DEVICE, dtype="fp32", speculate=speculate, **LIMITS) as llm:  # type: ignore[arg-type]
        scheduler, own = llm.engine.scheduler, llm.engine.scheduler.speculation
        assert own is not None
        scheduler.speculation = None
        plain = [answer.token_ids for answer in llm.generate(prompts, way)]
        known: Known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, plain, strict=True)}
        drafters: list[Drafter] = [Rememberer(known, 0.67), own._drafter]
        for drafter in drafters:
            scheduler.speculation = speculation = Speculation(drafter, 3)
            speculation._wants_plain = lambda rows: False  # type: ignore[method-assign]
            speculation._share_of_one_more = lambda tokens: 0.0  # type: ignore[method-assign]
            speculation.ahead = lambda requests, drafter=drafter: 3 * isinstance(drafter, RankDrafter)  # type: ignore[method-assign, misc]
            assert [answer.token_ids for answer in llm.generate(prompts, way)] == plain
            if drafter is not own._drafter or speculate == "mtp":
                assert speculation.totals.drafts > 10
