"""The quick price of a step is the price of a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.price import combine, least_seconds
from phalanx.cost.quick import QuickPrice
from phalanx.engine.step_sums import StepSums
from phalanx.models import catalog
from phalanx.plan.predict import Predictor, predictor
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

rows = st.lists(st.tuples(st.integers(0, 20_000), st.sampled_from([1, 1, 2, 300, 8192])), min_size=1, max_size=6)


def deployed(model: str, engine: str = "vllm", version: str = "") -> Predictor:
    return predictor(catalog.model(model), Machine.parse("2xH100-SXM"), 2, engine, Workload(), version=version)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["Llama-3.1-8B", "Qwen3-Next-80B-A3B", "gpt-oss-120b", "DeepSeek-V3", "Gemma-3-27B"]),
    st.sampled_from([("vllm", ""), ("vllm", "0.5.2"), ("sglang", ""), ("trtllm", "0.14")]),
    st.lists(rows, min_size=1, max_size=4),
    st.sampled_from([0.05, 1.0, 1.3]),
)
def test_it_is_the_sum_of_its_parts(
    model: str, engine: tuple[str, str], steps: list[list[tuple[int, int]]], factor: float
) -> None:
    """One price for several steps: what it keeps of one must hold for the next. A factor of 0.05 meets the floor."""
    made = deployed(model, *engine)
    rates = made.fitted.family_rates(made.traits.family, made.limits.gpu.architecture)
    quick = QuickPrice(made.limits, rates, factor)
    for told in steps:
        step = StepSums()
        for start, count in told:
            step.add_row(start, count)
        limits = made.limits.of(step)
        assert quick(step) == pytest.approx(max(factor * combine(limits, rates).total, least_seconds(limits)), rel=1e-9)
