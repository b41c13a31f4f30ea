"""Drafts in a plan: what they bring, what their head takes of memory and time, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

from phalanx.engine.step_sums import StepSums
from phalanx.errors import ConfigError
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Candidate
from phalanx.plan.engines import ENGINES
from phalanx.plan.fit import fit
from phalanx.plan.recipes.launch import command
from phalanx.plan.record import launch_of
from phalanx.plan.speculated import SpeculativePrice, drafting_part, drafting_work, tokens_of_row
from phalanx.spec import Layout
from phalanx.spec.machine import Machine

STEP = StepSums(4, 4000.0)


def priced(acceptance: float, per_row: float = 0.0, draft_s: float = 0.0, most: int = 3) -> SpeculativePrice:
    return SpeculativePrice(
        lambda step: 1.0 + per_row * step.decodes + 0.01 * step.prompt_tokens, lambda step: draft_s, acceptance, most
    )


def test_a_row_has_the_tokens_that_stand() -> None:
    assert tokens_of_row(0, 0.8) == 1
    assert isclose(tokens_of_row(3, 0.8), 1 + 0.8 + 0.64 + 0.512)
    assert tokens_of_row(3, 1.0) == 4


def test_a_token_takes_a_part_of_a_longer_step() -> None:
    assert isclose(priced(0.8)(STEP), 1 / tokens_of_row(3, 0.8)), "where longer rows cost nothing"
    assert isclose(priced(0.8, draft_s=0.1)(STEP), 1.3 / tokens_of_row(3, 0.8))
    assert isclose(priced(1.0, per_row=0.05)(STEP), (1 + 0.05 * 16) / 4)
    assert isclose(priced(0.0, per_row=0.05)(STEP), 1.2), "drafts that do not pay are not made"
    assert isclose(priced(0.5, per_row=100.0)(STEP), 401.0)


def test_prompts_take_what_they_take() -> None:
    beside = StepSums(4, 4000.0, 200, 20000.0, 1)
    assert isclose(priced(1.0)(beside), 3.0), "one step of one second for all rows, and two for the prompt"
    assert isclose(priced(1.0, per_row=0.1)(beside), 3.0 + 0.1 * 16 / 4)
    assert priced(0.9)(StepSums(0, 0, 200, 20000.0, 1)) == 3.0


def test_a_draft_is_made_by_one_layer_between_the_models_own_ends() -> None:
    spec = catalog.model("DeepSeek-V3")
    part = drafting_part(spec.with_drafts())
    assert part is not None
    assert drafting_part(spec) is None
    (layer,) = part.layers
    assert layer == spec.layers[-1]
    ends = 2 * spec.vocab * spec.hidden
    assert isclose((part.parameters - ends) / (spec.parameters - ends), 1 / 58, rel_tol=0.05)


def best(**asked: object) -> Candidate:
    question = PlanQuestion("DeepSeek-V3", "8xH200-SXM", engines="vllm", tps="8", **asked)  # type: ignore[arg-type]
    found = ask(question).best
    assert found is not None
    return found


def test_a_plan_prices_the_head() -> None:
    for concurrency, least, most in ((1, 1.6, 2.4), (8, 1.2, 2.0), (256, 1.0, 1.5)):
        plain = best(concurrency=concurrency)
        drafted = best(concurrency=concurrency, speculate="mtp", acceptance=0.8)
        assert least <= plain.prediction.tpot.mid / drafted.prediction.tpot.mid <= most
        assert drafted.fit.kv_tokens < plain.fit.kv_tokens, "the head takes its room"
    hopeless = best(concurrency=256, speculate="mtp", acceptance=0.0)
    assert isclose(hopeless.prediction.tpot.mid, plain.prediction.tpot.mid, rel_tol=1e-6)


QWEN = catalog.model("Qwen3.5-35B-A3B")
IN_FOUR_BITS, IN_FP8 = 248_320 * (2_048 // 2 + 16 * 3), 248_320 * 2_048 + 1_940 * 16 * 4
"""248,320 x 2,048 numbers: half a byte each, and for each 128 of a row a scale and a zero point; or a byte each, and a
scale for 128 x 128."""


@pytest.mark.parametrize(
    ("card", "engine", "copied"),
    [
        ("H200", "phalanx", IN_FOUR_BITS),
        ("L40S", "phalanx", IN_FP8),
        ("A100", "phalanx", 0),
        ("H200", "vllm", 0),
    ],
)
def test_a_plan_counts_the_copy_of_a_head_that_drafts_read(card: str, engine: str, copied: int) -> None:
    lines = [
        {line.what: line.bytes for line in fit(each, Machine.parse(card), 1, ENGINES[engine]).ranks[0].lines}
        for each in (QWEN, QWEN.with_drafts())
    ]
    assert "a head for drafts" not in lines[0]
    assert lines[1].get("a head for drafts", 0) == -copied


def test_a_small_share_of_a_head_is_not_copied() -> None:
    spec = QWEN.with_drafts()
    assert [bool(Layout(spec, tp).narrow_head_bytes(0, "9.0")) for tp in (1, 8, 16)] == [True, True, False]


def test_all_ranks_copy_the_head_or_none_does() -> None:
    """Shares differ by one unit of rows: here the first ones alone would be large enough."""
    spec = replace(QWEN.with_drafts(), vocab=3 * 16_384 - 16)
    layout = Layout(spec, 3)
    assert [len(shard.vocab) for shard in layout.shards] == [16_384, 16_384, 16_368]
    assert not any(layout.narrow_head_bytes(rank, "9.0") for rank in range(3))


def test_a_draft_is_priced_by_the_copy_it_reads() -> None:
    spec = QWEN.with_drafts()
    read = {
        capability: work.head_bytes
        for capability in ("9.0", "8.9", "8.0", "")
        if (work := drafting_work(spec, 1, "fp8", "bf16", capability))
    }
    assert read == {"9.0": IN_FOUR_BITS, "8.9": IN_FP8, "8.0": 2 * 248_320 * 2_048, "": 2 * 248_320 * 2_048}
    assert drafting_work(QWEN, 1, "fp8", "bf16", "9.0") is None


def test_a_recipe_asks_for_the_head() -> None:
    question = PlanQuestion(
        "DeepSeek-V3", "8xH200-SXM", engines="vllm", tps="8", speculate="mtp", speculate_tokens=2, acceptance=0.8
    )
    plan = ask(question)
    assert plan.best is not None
    words = command(launch_of(plan, plan.best))
    assert words[words.index("--speculative-config") + 1] == '{"method": "mtp", "num_speculative_tokens": 2}'


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "Llama-3.3-70B", "speculate": "mtp", "acceptance": 0.8}, "no head that drafts"),
        ({"speculate": "ngram"}, "acceptance of None"),
        ({"acceptance": 0.8}, "speculate is 'off'"),
        ({"speculate": "eagle", "acceptance": 0.8}, "speculate is 'eagle'"),
    ],
)
def test_what_nobody_drafts_is_refused(asked: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        ask(PlanQuestion(**({"model": "DeepSeek-V3", "machine": "8xH200-SXM"} | asked)))  # type: ignore[arg-type]
    assert refused.value.fix
