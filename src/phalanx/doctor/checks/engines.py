"""Engines that are installed: pairs of versions that were seen to fail, and checkpoints that they cannot load."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.doctor.checks.deployment import Deployment
from phalanx.doctor.checks.products import machine_of
from phalanx.doctor.checks.software import version
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding
from phalanx.plan.engines import ENGINES
from phalanx.plan.shapes import shape
from phalanx.spec.formats import FP8_FORMATS

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
_PLANNED_AS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
_BOUND = re.compile(r"(>=|<=|==|<|>)(\d+(?:\.\d+)*)")


@cache
def known_bad() -> dict[str, list[dict[str, Any]]]:
    """`known_bad.toml`, with its sources."""
    return tomllib.loads((files("phalanx.doctor") / "known_bad.toml").read_text(encoding="utf-8"))


def holds(found: str | None, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=2.30.4,<2.31`; missing numbers count as 0."""
    has = version(found)
    return bool(has) and all(_compare(has, *_BOUND.fullmatch(bound).groups()) for bound in bounds.split(","))  # type: ignore[union-attr]


def _compare(has: tuple[int, ...], sign: str, text: str) -> bool:
    wanted = version(text)
    length = max(len(has), len(wanted))
    one, other = (each + (0,) * (length - len(each)) for each in (has, wanted))
    return {">=": one >= other, "<=": one <= other, "==": one == other, "<": one < other, ">": one > other}[sign]


def engine_versions(facts: Facts) -> Iterator[Finding]:
    """What is installed against pairs that are known to fail."""
    found = _installed(facts)
    told = ", ".join(f"{NAMES.get(name, name)} {found[name]}" for name in NAMES if found.get(name))
    bad = [pair for pair in known_bad()["pair"] if _applies(pair, facts, found)]
    for pair in bad:
        which = ", ".join(f"{NAMES.get(name, name)} {found[name]}" for name in pair["needs"])
        title = "Versions that were seen to fail together" if len(pair["needs"]) > 1 else "A version seen to fail"
        yield Finding(
            pair["level"], "engine_versions", title, f"{which}: {pair['problem']}", pair["source"], pair["fix"]
        )
    if told and not bad:
        yield Finding("ok", "engine_versions", "Engines", told)


def _installed(facts: Facts) -> dict[str, str | None]:
    software = facts.software
    ours = {
        "nccl": software.nccl,
        "torch": software.torch,
        "cuda": software.torch_cuda,
        "ray": software.ray,
        "driver": software.driver if facts.gpus else None,
        "connectx": next((nic.firmware for nic in facts.network.nics if nic.rdma and nic.firmware), None),
    }
    return ours | dict(software.engines)


def _applies(pair: dict[str, Any], facts: Facts, found: dict[str, str | None]) -> bool:
    cards = [gpu for gpu in facts.gpus if any(word in gpu.name for word in pair.get("cards", [""]))]
    least = version(pair.get("capability"))
    new_enough = [gpu for gpu in cards if version(gpu.capability) >= least]
    if ("cards" in pair or least) and not new_enough:
        return False
    return all(holds(found.get(name), bounds) for name, bounds in pair["needs"].items())


def fp8_engine(facts: Facts, deployment: Deployment) -> Iterator[Finding]:
    """An FP8 checkpoint against each engine that is installed and is to load it: card, version, blocks at this TP."""
    spec, weights = deployment.spec, deployment.weights
    if spec is None or weights not in FP8_FORMATS:
        return
    machine = machine_of(facts)
    for name, installed in facts.software.engines.items():
        if name not in NAMES:
            continue
        engine = ENGINES[_PLANNED_AS[name]]
        what = f"{NAMES[name]} {installed}, {deployment.model} in {weights} at TP={deployment.tp}"
        refused = engine.refuses_card(machine, weights) if machine is not None else None
        judged = shape(spec.in_format(weights), deployment.tp, engine)
        first = next((e for e in known_bad()["loads"] if (e["engine"], e["format"]) == (name, weights)), None)
        if refused is not None:
            yield Finding("error", "fp8_engine", "The engine does not load FP8 on this card", what, refused, _ELSEWHERE)
        elif first is not None and holds(installed, f"<{first['from']}"):
            why = f"It loads {weights} from {first['from']} on ({first['source']})."
            yield Finding("error", "fp8_engine", "The engine is too old for this checkpoint", what, why, "Update it.")
        elif not judged.is_legal:
            yield Finding(
                "error", "fp8_engine", "The engine cuts FP8 blocks at this TP", what, judged.problems[0], judged.fix
            )
        else:
            yield Finding("ok", "fp8_engine", "FP8 and the engine", what)


_ELSEWHERE = "Use bf16 or four bits there, another engine, or Phalanx where it has kernels."
