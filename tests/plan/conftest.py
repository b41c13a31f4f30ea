"""A predictor one can do in the head, in place of the calibrated one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cost.price import StepCost
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

ALL_REDUCE = 0.002
HELD_BY_A_REPLICA = 2.0


def around(mid: float) -> SimpleNamespace:
    return SimpleNamespace(low=0.9 * mid, mid=mid, high=1.2 * mid)


class Predictor:
    """A step reads the weights once and adds 2 ms for all-reduces; TTFT is a millisecond a client."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, spec: ModelSpec, machine: Machine, tp: int, *, workload: Workload, **told: Any
    ) -> SimpleNamespace:
        self.calls.append({"tp": tp, "workload": workload} | told)
        reads = spec.weight_bytes(told["weights"]) / tp / machine.smallest.bandwidth
        step = reads + (ALL_REDUCE if tp > 1 else 0.0)
        return SimpleNamespace(
            ttft=around(0.001 * workload.concurrency),
            tpot=around(step),
            throughput=around(workload.concurrency / step),
            requests_ttft=(0.001, 0.002 * workload.concurrency),
            requests_tpot=(step,),
            all_reduce_share=(step - reads) / step,
            step=StepCost(reads, 0.0, 0.0, step - reads, 0.0),
            preemptions=0,
            is_held=True,
            cached_share=0.0,
        )


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Predictor:
    """Stands in for the calibrated prediction wherever plans are made."""
    simple = Predictor()
    monkeypatch.setattr("phalanx.plan.search.predict", simple)
    monkeypatch.setattr("phalanx.plan.search.capacity", lambda *told: HELD_BY_A_REPLICA)
    return simple
