"""Where the cockpit's questions are answered: a process beside the server, so that no plan delays a token."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec

from phalanx.errors import ConfigError, PhalanxError
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.compare import compared, record
from phalanx.plan.engines import ENGINES, GIB, engine
from phalanx.plan.explain import nearest, verdict
from phalanx.plan.recipes import KINDS, recipe
from phalanx.plan.record import candidate_dict, launch_of, to_dict
from phalanx.plan.survey import pareto, survey
from phalanx.plan.systems import SYSTEMS
from phalanx.spec.formats import FORMATS, KV_FORMATS
from phalanx.spec.machine import Gpu, Machine, gpus
from phalanx.spec.network import NETWORKS
from phalanx.spec.workload import Workload

LENGTH_BYTES = 4
MOST_GPUS = 64
MOST_MACHINES = 6
_NICENESS = 10
_MEMORY_BYTES = 2 * 2**30

PRESETS = (
    "1xRTX4090",
    "2xRTX4090",
    "4xL40S",
    "4xRTX-PRO-6000",
    "4xA100-SXM-80GB",
    "4xH100-SXM",
    "8xH100-SXM",
    "8xH200-SXM",
    "8xB200",
    "4xDGX-Spark",
    "8xMI300X",
    "2xRTX4090+1xRTX3090",
)


class Wrong(Exception):
    """An error in the part of the question that `param` names."""

    def __init__(self, error: PhalanxError, param: str | None) -> None:
        super().__init__(str(error))
        self.told = {**error.to_dict(), "param": param}


@contextmanager
def _about(param: str | None) -> Iterator[None]:
    try:
        yield
    except PhalanxError as error:
        raise Wrong(error, param) from None


def main() -> None:
    """Answer until standard input ends, which it does with the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES,) * 2)
    while asked := _read(sys.stdin.buffer):
        body = answer(asked)
        answers.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)


def _read(stream: BinaryIO) -> bytes:
    """The next message; empty at the end."""
    return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "little"))


def answer(asked: bytes) -> bytes:
    """`{"kind", "question"}` in; `{"answer"}` or `{"error"}` out."""
    message = msgspec.json.decode(asked)
    try:
        found = _KINDS[message["kind"]](message["question"])
    except Wrong as wrong:
        return msgspec.json.encode({"error": wrong.told})
    return b'{"answer":' + msgspec.json.encode(found) + b"}"


def _plan(asked: dict[str, Any]) -> dict[str, Any]:
    question = _question(asked)
    with _about(None):
        return to_dict(ask(question))


def _compare(asked: dict[str, Any]) -> dict[str, Any]:
    """The same question of several machines; of one that cannot hold the model, why."""
    names = [name.strip() for name in asked["machine"].split(",") if name.strip()]
    with _about("machine"):
        if not 1 <= len(names) <= MOST_MACHINES:
            raise ConfigError("bad_machine", f"{len(names)} machines are named.", f"Name 1 to {MOST_MACHINES}.")
    questions = [_question({**asked, "machine": name}) for name in names]
    with _about(None):
        plans = [ask(question) for question in questions]
    return {"machines": [record(compared(plan)) | {"verdict": verdict(plan)} for plan in plans]}


def _ranking(asked: dict[str, Any]) -> dict[str, Any]:
    """The best of every engine that runs there, best first."""
    with _about(None):
        plan = ask(_question({**asked, "engines": ""}))
    best = {each.engine.name: each for each in reversed(plan.candidates)}
    ranked = sorted(best.values(), key=plan.candidates.index)
    missing = {each.engine: each.found for each in reversed(nearest(plan.excluded)) if each.engine not in best}
    return {"engines": [candidate_dict(plan, each) for each in ranked], "missing": missing}


def _recipe(asked: dict[str, Any]) -> dict[str, Any]:
    kind = asked.pop("kind")
    question = _question(asked)
    with _about(None):
        plan = ask(question)
        if plan.best is None:
            raise ConfigError("does_not_fit", verdict(plan), "Use a larger machine or a smaller format.")
        return {"files": recipe(launch_of(plan, plan.best), kind)}


def _question(asked: dict[str, Any]) -> PlanQuestion:
    """Checked part by part, so that an error can be told beside the field that it is about."""
    with _about("model"):
        catalog.known(asked["model"])
    _machine(asked["machine"], asked.get("network", ""))
    return PlanQuestion(**asked)


def _machine(text: str, network: str = "") -> Machine:
    with _about("machine"):
        machine = Machine.parse(text, network)
        if len(machine) > MOST_GPUS:
            raise ConfigError(
                "bad_machine", f"{machine.name} has {len(machine)} GPUs.", f"Ask for {MOST_GPUS} at most."
            )
        return machine


def _pareto(asked: dict[str, Any]) -> dict[str, Any]:
    question = _question(asked)
    machine = _machine(question.machine)
    load = Workload(question.input_tokens, question.output_tokens, 1, question.spread)
    with _about(None):
        points = pareto(
            catalog.model(question.model),
            machine,
            load,
            engine(question.engines),
            catalog.check_format(question.formats),
            question.kv_format,
            [int(tp) for tp in question.tps.split(",") if tp],
        )
    return {"points": [vars(point) for point in points]}


def _fits(asked: dict[str, Any]) -> dict[str, Any]:
    machine = _machine(asked["machine"])
    with _about(None):
        models = survey(machine, engine(asked["engines"]), asked["kv_format"], asked["context"])
    return {"machine": machine.name, "models": models}


def _catalog(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "models": [_model_facts(entry) for entry in catalog.entries().values()],
        "gpus": [_gpu_facts(gpu) for gpu in gpus()],
        "engines": [
            {
                "name": each.name,
                "title": each.title,
                "version": each.version,
                "formats": each.weight_formats,
                "kv_formats": each.kv_formats,
            }
            for each in ENGINES.values()
        ],
        "formats": list(FORMATS),
        "kv_formats": KV_FORMATS,
        "machines": PRESETS,
        "most_gpus": MOST_GPUS,
        "networks": list(NETWORKS),
        "recipes": list(KINDS),
        "systems": [vars(each) for each in SYSTEMS.values()],
    }


def _model_facts(entry: catalog.Entry) -> dict[str, Any]:
    spec = entry.spec
    return {
        "name": entry.name,
        "id": entry.ids[0],
        "family": spec.model_type,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "max_positions": spec.max_positions,
        "format": spec.number_format,
        "checkpoints": dict(entry.variants),
        "served_by_phalanx": spec.refusal is None,
    }


def _gpu_facts(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "memory_gib": gpu.memory_bytes / GIB,
        "unified_memory": gpu.unified_memory,
        "bandwidth_gbs": gpu.bandwidth / 1e9,
        "formats": list(gpu.peaks),
        "link": gpu.link.kind,
        "link_gbs": gpu.link.bandwidth / 1e9,
        "link_gpus": gpu.link_gpus,
        "beyond": gpu.beyond.kind,
        "beyond_gbs": gpu.beyond.bandwidth / 1e9,
        "power_w": gpu.power_w,
    }


_KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "plan": _plan,
    "pareto": _pareto,
    "fits": _fits,
    "compare": _compare,
    "ranking": _ranking,
    "recipe": _recipe,
    "catalog": _catalog,
}


if __name__ == "__main__":
    main()
