"""Predictions: what one can say without a calibration file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import log
from typing import Any

import pytest
from msgspec import structs

from phalanx.cost.fitted import Width
from phalanx.cost.profiles import ProfileError, profile
from phalanx.cost.rules import Rules
from phalanx.models import catalog
from phalanx.plan import predict as module
from phalanx.plan.predict import Interval, Prediction, percentile, predict, predictor
from phalanx.plan.simulate import Trace, simulate
from phalanx.spec.machine import Machine
from phalanx.spec.workload import Workload

LOAD = Workload(1024, 256, 16, spread=0.2, requests=64)


def llama(machine: str = "8xH100-SXM", tp: int = 4, engine: str = "vllm", load: Workload = LOAD) -> Prediction:
    return predict(catalog.model("Llama-3.3-70B"), Machine.parse(machine), tp, engine, load, "fp8")


@pytest.mark.parametrize("engine", ["phalanx", "vllm", "sglang", "trtllm"])
def test_more_ranks_are_faster_and_talk_more(engine: str) -> None:
    found = [llama(tp=tp, engine=engine) for tp in (1, 2, 4, 8)]
    tpot = [each.tpot.mid for each in found]
    assert tpot == sorted(tpot, reverse=True)
    assert tpot[0] < 8 * tpot[-1]
    shares = [each.all_reduce_share for each in found]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] < 0.6


def test_each_quantity_has_the_width_that_was_fitted_for_it() -> None:
    """Of a model and a card that were measured: a factor of 2 between tokens, of 3 to the first one."""
    made = predictor(catalog.model("gpt-oss-120b"), Machine.parse("2xH200"), 2, "vllm", LOAD)
    widths = {name: Width(9.0, {made.traits.family: log(factor)}) for name, factor in (("tpot", 2), ("ttft", 3))}
    fitted = structs.replace(
        made.fitted,
        tpot=structs.replace(made.fitted.tpot, width=widths["tpot"]),
        ttft=structs.replace(made.fitted.ttft, width=widths["ttft"]),
    )
    found = replace(made, fitted=fitted).predict(LOAD, profile("vllm").rules, None)
    for interval, factor in ((found.ttft, 3), (found.tpot, 2), (found.throughput, 2)):
        assert interval.low == pytest.approx(interval.mid / factor)
        assert interval.high == pytest.approx(interval.mid * factor)


def test_no_step_beats_the_hardware() -> None:
    """Weights in FP8 over all bandwidth of the cards bound TPOT from below."""
    spec = catalog.model("Llama-3.3-70B")
    for tp in (1, 2, 4, 8):
        limit = (spec.weight_bytes("fp8") - 2 * spec.vocab * spec.hidden) / tp / 3.35e12
        assert llama(tp=tp).tpot.mid > limit


def test_what_was_never_measured_has_wider_bounds() -> None:
    def width(interval: Interval) -> float:
        return interval.high / interval.low

    known = predict(catalog.model("gpt-oss-120b"), Machine.parse("2xH200"), 2, "vllm", LOAD)
    other_model = predict(catalog.model("Mixtral-8x22B"), Machine.parse("2xH200"), 2, "vllm", LOAD)
    other_gpu = predict(catalog.model("gpt-oss-120b"), Machine.parse("2xMI325X"), 2, "vllm", LOAD)
    assert width(known.tpot) < width(other_model.tpot)
    assert width(known.tpot) < width(other_gpu.tpot)


def test_throughput_is_what_the_loop_turns_out() -> None:
    found = llama()
    seconds = found.ttft.mid + (LOAD.mean_output - 1) * found.tpot.mid
    assert found.throughput.mid == pytest.approx(16 * LOAD.mean_output / seconds, rel=0.15)


def test_slower_links_slow_the_step() -> None:
    assert llama("4xH100-PCIe").all_reduce_share > llama("4xH100-SXM").all_reduce_share


def test_the_slowest_card_sets_the_pace() -> None:
    spec, load = catalog.model("Llama-3.1-8B"), Workload(512, 64, 4, requests=16)
    mixed = predict(spec, Machine.parse("1xRTX5090+1xRTX3090"), 2, "vllm", load)
    slow = predict(spec, Machine.parse("2xRTX3090"), 2, "vllm", load)
    assert mixed.tpot.mid == pytest.approx(slow.tpot.mid, rel=0.05)


def test_traffic_by_the_clock_is_served_at_its_rate() -> None:
    found = llama(load=Workload(1024, 128, spread=0.2, rate=2.0, requests=100))
    assert found.throughput.mid == pytest.approx(2.0 * 128 * 0.9, rel=0.15)
    crowded = llama(load=Workload(1024, 128, spread=0.2, rate=40.0, requests=100))
    assert crowded.ttft.mid > 2 * found.ttft.mid


def test_percentiles() -> None:
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([], 0.5) == 0
    found = llama()
    assert percentile(found.requests_ttft, 0.1) < found.ttft.mid < percentile(found.requests_ttft, 0.99)


def test_an_unknown_engine_is_told_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="vllm, sglang, trtllm, phalanx"):
        llama(engine="tgi")


def test_a_plan_of_all_degrees_and_formats_simulates_each_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a closed loop the steps do not depend on what they cost, which is why a plan takes seconds."""
    spec, load = catalog.model("Llama-3.3-70B"), Workload(1024, 256, 32, spread=0.2, requests=257)
    simulated: list[Rules] = []

    def counted(workload: Workload, rules: Rules, *more: Any) -> Trace:
        simulated.append(rules)
        return simulate(workload, rules, *more)

    monkeypatch.setattr(module, "simulate", counted)
    engines = ("phalanx", "vllm", "sglang", "trtllm")
    for weights in ("bf16", "fp8"):
        for tp in (1, 2, 4, 8):
            for engine in engines:
                predict(spec, Machine.parse("8xH100-SXM"), tp, engine, load, weights)
    assert len(simulated) == len(set(simulated)) <= len(engines)


def test_predicting_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, phalanx.plan.evaluate; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
