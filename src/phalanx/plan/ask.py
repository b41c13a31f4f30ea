"""From the words of a command line to a plan, and from a plan to what is printed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from phalanx.errors import ConfigError
from phalanx.models import catalog
from phalanx.plan.candidates import Plan
from phalanx.plan.choose import choose
from phalanx.plan.compare import compared, record, show_comparison, show_what_fits, what_fits
from phalanx.plan.engines import ENGINES, EngineTraits, engine
from phalanx.plan.price import Tariff
from phalanx.plan.recipes import recipe as make_recipe
from phalanx.plan.recipes import write_files
from phalanx.plan.record import launch_of, to_dict
from phalanx.plan.report import show
from phalanx.plan.scaling import draw_scaling
from phalanx.plan.slo import Slo
from phalanx.plan.speculated import published_acceptance
from phalanx.plan.systems import OperatingSystem, system
from phalanx.plan.traffic import read_sessions
from phalanx.spec.calibration import Calibration
from phalanx.spec.formats import DTYPE_NAMES, KV_FORMATS, STATE_DTYPES
from phalanx.spec.machine import Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

_DRAFTERS = ("off", "mtp", "ngram")


@dataclass(frozen=True)
class PlanQuestion:
    """What was asked for, as it was written."""

    model: str
    machine: str
    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 32
    slo: str = ""
    engines: str = ""
    tps: str = ""
    formats: str = ""
    kv_format: str = "bf16"
    state_dtype: str = "auto"
    spread: float = 0.2
    requests: int | None = None
    rate: float | None = None
    trace: Path | None = None
    shared_prefix: int = 0
    agents: int = 1
    electricity: float = 0.12
    years: float = 4.0
    context: int | None = None
    calibration: Path | Calibration | None = None
    network: str = ""
    colocation: float = 150.0
    staff: float = 0.0
    residency: float = 0.0
    speculate: str = "off"
    speculate_tokens: int = 3
    acceptance: float | None = None
    os: str = "linux"


def answer(
    question: PlanQuestion,
    recipe: str | None,
    folder: Path | None,
    as_json: bool,
    in_full: bool = False,
    plot: Path | None = None,
) -> None:
    """Plan, then print the plan and write or print its files. Raises when nothing fits, after saying why.

    `plot`: where the scaling curve is drawn.
    """
    plan = ask(question)
    files = make_recipe(launch_of(plan, plan.best), recipe) if recipe is not None and plan.best else None
    if as_json:
        print(json.dumps(to_dict(plan, files)))
    else:
        show(plan, Console(highlight=False), in_full)
    if files is not None and folder is not None:
        write_files(files, folder)
    elif files is not None and not as_json:
        for name, text in files.items():
            print(f"\n# ---- {name}\n{text}", end="")
    if plot is not None and plan.best is not None:
        draw_scaling(plan, plot)
    if plan.best is None and not as_json:
        raise ConfigError(
            "does_not_fit", f"{plan.model} does not run on {plan.machine.name}.", "See the reasons above."
        )


def compare(question: PlanQuestion, as_json: bool) -> None:
    """The same question of several machines, side by side."""
    names = [name.strip() for name in question.machine.split(",") if name.strip()]
    plans = [ask(dataclasses.replace(question, machine=name)) for name in names]
    if as_json:
        print(json.dumps([record(compared(plan)) for plan in plans]))
    else:
        show_comparison(plans, Console(highlight=False))


def tell_what_fits(question: PlanQuestion, as_json: bool) -> None:
    """Without a model: all that the machine holds."""
    machine = Machine.parse(question.machine, question.network)
    if question.state_dtype != "auto":
        raise ConfigError("bad_option", f"state_dtype is {question.state_dtype!r} without a model.", "Name a model.")
    context = question.context or question.input_tokens + question.output_tokens
    found = what_fits(machine, context, _kv_format(question.kv_format))
    if as_json:
        print(json.dumps(found))
    else:
        show_what_fits(machine, found, Console(highlight=False))


def ask(question: PlanQuestion) -> Plan:
    """The plan for a question; every word that is not understood is refused with the nearest that is."""
    kept = catalog.model(question.model).keeping_states_in(_state_dtype(question.state_dtype))
    spec = _with_drafts(kept, question)
    there = system(question.os)
    machine = there.on(_machine(question))
    formats = tuple(catalog.check_format(name) for name in _words(question.formats))
    return choose(
        spec,
        question.model,
        machine,
        _workload(question, spec),
        slo=Slo.parse(question.slo),
        engines=_engines(question, there),
        formats=formats,
        kv_format=_kv_format(question.kv_format),
        tps=_degrees(question.tps, len(machine)),
        tariff=Tariff(
            question.electricity,
            years=question.years,
            colocation=question.colocation,
            staff=question.staff,
            residency=question.residency,
        ),
        context=question.context,
    )


def _with_drafts(spec: ModelSpec, question: PlanQuestion) -> ModelSpec:
    """With the head that drafts, and with what states need to go back, where that is asked for."""
    told = question.acceptance is not None
    missing = question.speculate == "ngram" and not told  # only the model's own head has a published share
    if question.speculate not in _DRAFTERS or (question.speculate == "off" and told) or missing:
        raise ConfigError(
            "bad_option",
            f"speculate is {question.speculate!r}, with an acceptance of {question.acceptance}.",
            f"Use one of {', '.join(_DRAFTERS)}, with the share of drafts that come true, such as --acceptance 0.8.",
        )
    if question.speculate == "mtp" and spec.head is None:
        raise ConfigError(
            "no_draft_head",
            f"{question.model} has no head that drafts.",
            "Use --speculate ngram, or a model that has one (num_nextn_predict_layers in its config.json).",
        )
    if question.speculate == "off":
        return spec
    able = spec.going_back(1 + question.speculate_tokens)
    return able.with_drafts() if question.speculate == "mtp" else able


def _engines(question: PlanQuestion, there: OperatingSystem) -> list[EngineTraits]:
    """Those that were asked for and that run on this system."""
    asked = [engine(name) for name in _words(question.engines)] or list(ENGINES.values())
    found = [each for each in asked if each.name in there.engines]
    if not found:
        names = ", ".join(each.title for each in asked)
        raise ConfigError("no_engine_there", f"{names} do not run on {there.title}. {there.note}", there.instead)
    return found


def _machine(question: PlanQuestion) -> Machine:
    machine, calibration = Machine.parse(question.machine, question.network), question.calibration
    if calibration is None:
        return machine
    return machine.calibrated(Calibration.read(calibration) if isinstance(calibration, Path) else calibration)


def _acceptance(question: PlanQuestion, spec: ModelSpec) -> float | None:
    """As told, or as published of the model's own head."""
    if question.speculate == "mtp" and question.acceptance is None:
        return published_acceptance(spec.model_type)[0]
    return question.acceptance


def _workload(question: PlanQuestion, spec: ModelSpec) -> Workload:
    trace, sessions = read_sessions(question.trace) if question.trace is not None else ((), ())
    return Workload(
        input_tokens=question.input_tokens,
        output_tokens=question.output_tokens,
        concurrency=question.concurrency,
        spread=question.spread,
        requests=question.requests,
        rate=question.rate,
        trace=trace,
        sessions=sessions,
        shared_prefix=question.shared_prefix,
        agents=question.agents,
        acceptance=_acceptance(question, spec),
        drafts=question.speculate_tokens,
    )


def _words(text: str) -> list[str]:
    return [word.strip().lower() for word in text.split(",") if word.strip()]


def _kv_format(name: str) -> str:
    if name not in KV_FORMATS:
        near = get_close_matches(name, KV_FORMATS, n=1, cutoff=0.3)
        suggestion = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            "unknown_format", f"KV cannot be kept as {name!r}.", f"{suggestion}Use {' or '.join(KV_FORMATS)}."
        )
    return name


def _state_dtype(asked: str) -> str:
    name = DTYPE_NAMES.get(asked, asked)
    if name not in STATE_DTYPES:
        raise ConfigError("bad_option", f"state_dtype is {asked!r}.", f"Use one of {', '.join(STATE_DTYPES)}.")
    return name


def _degrees(text: str, gpus: int) -> list[int]:
    degrees = []
    for word in _words(text):
        if not word.isdecimal() or not 1 <= int(word) <= gpus:
            raise ConfigError("bad_tp", f"--tp names {word!r}; the machine has {gpus} GPUs.", f"Use 1 to {gpus}.")
        degrees.append(int(word))
    return degrees
