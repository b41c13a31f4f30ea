"""Whatever the facts, no check crashes; and facts that get worse never make the verdict better."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.doctor.checks import Deployment, judge, judge_together
from phalanx.doctor.facts import Corruption, Facts, GpuFacts, Measured, RemappedRows
from phalanx.doctor.finding import Finding
from phalanx.models import catalog
from phalanx.spec.machine import Machine
from tests.doctor.build_machines import MACHINES, change

_GPU_NAMES = (
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA GB200",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GB10",
    "NVIDIA Z9000",
    "",
)
_WORDS = st.one_of(
    st.sampled_from(
        ("12.8", "13.0", "580.95.05", "9.0", "8.6", "12.1", "x86_64", "aarch64", "never", "192.168.1.2/24")
    ),
    st.text(max_size=12),
)
_MODELS = ("Llama-3.3-70B", "Qwen2.5-72B", "Qwen3-30B-A3B", "SmolLM2-135M", "gpt-oss-120b", "DeepSeek-V3")


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that facts are made of."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(strategy, arguments))
    if origin is tuple:
        return st.lists(strategy(arguments[0]), max_size=4).map(tuple)
    if origin is dict:
        keys = st.sampled_from(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "peer"))
        return st.dictionaries(keys, strategy(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct(kind)
    plain = {
        type(None): st.none(),
        bool: st.booleans(),
        int: st.one_of(st.integers(-2, 20), st.integers(0, 2**42)),
        float: st.floats(-1, 1e6, allow_nan=False),
        str: _WORDS,
    }
    return plain[kind]


def struct(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {name: strategy(hint) for name, hint in hints.items() if name in kind.__struct_fields__}
    if kind is GpuFacts:
        fields |= {"name": st.sampled_from(_GPU_NAMES), "index": st.integers(0, 5)}
    return st.builds(kind, **fields)


ANY_FACTS = struct(Facts)
DEPLOYMENTS = st.builds(
    Deployment,
    tp=st.sampled_from((1, 2, 3, 4, 8, 64)),
    model=st.sampled_from(_MODELS),
    number_format=st.sampled_from(("", "bf16", "fp8", "nvfp4", "awq")),
    concurrency=st.sampled_from((1, 8, 16)),
    planned=st.sampled_from((None, Machine.parse("4xH100-SXM"))),
    elsewhere=st.integers(0, 8),
).map(lambda told: dataclasses.replace(told, spec=catalog.model(told.model)))


QUIET = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(ANY_FACTS, DEPLOYMENTS)
def test_no_facts_crash_a_check(facts: Facts, deployment: Deployment) -> None:
    for finding in judge(facts, deployment):
        assert isinstance(finding, Finding)
        assert finding.level in ("error", "warning", "note", "ok")


@QUIET
@given(st.lists(ANY_FACTS, min_size=2, max_size=3))
def test_no_group_of_machines_crashes_a_check(machines: list[Facts]) -> None:
    for finding in judge_together(machines):
        assert isinstance(finding, Finding)


def test_facts_that_tell_nothing_are_never_called_fine_or_faulty() -> None:
    for name, build in MACHINES.items():
        told = build()
        blank = Facts(
            told.recorded_at,
            type(told.system)(hostname="box"),
            type(told.software)(python="3.12", phalanx="0.1"),
            tuple(GpuFacts(index=gpu.index, name=gpu.name, unified=gpu.unified) for gpu in told.gpus),
        )
        levels = {(finding.level, finding.code) for finding in judge(blank)}
        assert levels <= {
            ("ok", "gpu_names"),
            ("warning", "gpu_names"),
            ("note", "topology"),
            ("note", "torch_gpus"),
            ("note", "power_supply"),
        }, name


def worst(facts: Facts) -> int:
    return max(("ok", "note", "warning", "error").index(finding.level) for finding in judge(facts))


def _first(facts: Facts, **told: Any) -> Facts:
    return change(facts, gpus=(change(facts.gpus[0], **told), *facts.gpus[1:])) if facts.gpus else facts


def _system(facts: Facts, **told: Any) -> Facts:
    return change(facts, system=change(facts.system, **told))


def _links_down(facts: Facts) -> Facts:
    links = facts.gpus[0].links if facts.gpus else None
    return _first(facts, links=tuple(change(link, active=False) for link in links)) if links else facts


WORSE = {
    "an uncorrectable error": lambda facts: _first(facts, uncorrected_errors=9),
    "rows without spare": lambda facts: _first(facts, remapped=RemappedRows(0, 9, pending=True, failed=True)),
    "a card off the bus": lambda facts: change(facts, lost_gpus=(9,)),
    "an Xid": lambda facts: _system(facts, xids=(*(facts.system.xids or ()), 79)),
    "heat": lambda facts: _first(facts, throttle=("hw-thermal",)),
    "fewer lanes": lambda facts: _first(facts, pcie_width=1, pcie_width_max=16),
    "links down": _links_down,
    "no shared memory": lambda facts: _system(facts, shm_bytes=0),
    "a full disk": lambda facts: _system(facts, disk=change(facts.system.disk, free_bytes=0)),
    "wrong sums": lambda facts: change(facts, measured=Measured(corruptions=(Corruption(0, 8, 1),))),
    "no GPU for torch": lambda facts: change(facts, software=change(facts.software, torch_sees_gpus=0)),
    "an old driver": lambda facts: change(facts, software=change(facts.software, driver="470.1")),
}
MUST_FAIL = {
    "an uncorrectable error",
    "rows without spare",
    "a card off the bus",
    "an Xid",
    "wrong sums",
    "an old driver",
}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(MACHINES)), st.lists(st.sampled_from(sorted(WORSE)), min_size=1, max_size=3))
def test_what_gets_worse_never_looks_better(name: str, changes: list[str]) -> None:
    facts = MACHINES[name]()
    for change_name in changes:
        worse = WORSE[change_name](facts)
        assert worst(worse) >= worst(facts), change_name
        facts = worse
    if MUST_FAIL & set(changes):
        assert worst(facts) == 3
