"""Serving measurements as files have them, and what has to be simulated and priced to predict each."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.cost.correction import Traits, traits_of
from phalanx.cost.price import Roofline
from phalanx.cost.profiles import EngineProfile, profile
from phalanx.cost.rules import Rules
from phalanx.cost.work import count_work
from phalanx.errors import PhalanxError
from phalanx.models import catalog
from phalanx.plan.engines import engine as engine_traits
from phalanx.plan.fit import fit
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.model import ModelSpec
from phalanx.spec.workload import Workload

COLUMNS = (
    *("engine", "version", "gpu", "tp", "ep", "model", "precision", "kv_dtype"),
    *("isl", "osl", "concurrency", "length_rule", "ttft_ms", "tpot_ms"),
)
_UNIFORM_SPREAD = 0.2
_UNLIMITED_CLIENTS = 512
"""InferenceX marks runs that sent everything at once so; the engine then held far fewer sequences."""
_UNLIMITED_SEQUENCES = 24
_LOOSE_SWEEP = 1000
"""NVIDIA sweeps in lengths of round thousands: their times to first token show requests that do not end together."""
_SWEEP_BATCHED_TOKENS = 2048
"""What vLLM's times to first token in the NVIDIA sweeps (fixed lengths) show; InferenceX states 8192."""


class MeasurementError(PhalanxError):
    """The file does not hold measurements."""


@dataclass(frozen=True)
class Measurement:
    """One row: a deployment under load, with the mean seconds to the first token and between tokens."""

    engine: str
    version: str
    gpu: str
    tp: int
    ep: int
    model: str
    precision: str
    kv_dtype: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft: float
    tpot: float
    has_fixed_lengths: bool

    @property
    def series(self) -> tuple[str, str, str, int]:
        """Rows of one series are one machine with one model; cross-validation never splits them."""
        return self.engine, self.gpu, self.model, self.tp

    def __str__(self) -> str:
        return (
            f"{self.engine} {self.version} {self.model} {self.tp}x{self.gpu} "
            f"{self.input_tokens}/{self.output_tokens} c={self.concurrency}"
        )


@dataclass(frozen=True)
class Case:
    """A measurement ready to be predicted."""

    measurement: Measurement
    profile: EngineProfile
    rules: Rules
    workload: Workload
    kv_tokens: int | None
    limits: Roofline
    traits: Traits

    @property
    def trace_key(self) -> tuple[Workload, Rules, int | None]:
        return self.workload, self.rules, self.kv_tokens


def read_measurements(path: Path) -> list[Measurement]:
    """Every row of a file with the columns of `serving_measurements.csv`."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise MeasurementError(
                "missing_columns", f"{path.name} has no column {', '.join(missing)}.", f"It needs {', '.join(COLUMNS)}."
            )
        return [_read_row(row, path, number) for number, row in enumerate(reader, start=2)]


def _read_row(row: dict[str, str], path: Path, number: int) -> Measurement:
    try:
        return Measurement(
            engine=row["engine"],
            version=row["version"],
            gpu=row["gpu"],
            tp=int(row["tp"]),
            ep=int(row["ep"] or 1),
            model=row["model"],
            precision=row["precision"],
            kv_dtype=row["kv_dtype"] or _unstated_kv_dtype(row),
            input_tokens=int(row["isl"]),
            output_tokens=int(row["osl"]),
            concurrency=int(row["concurrency"]),
            ttft=float(row["ttft_ms"]) / 1e3,
            tpot=float(row["tpot_ms"]) / 1e3,
            has_fixed_lengths=row["length_rule"] == "fixed",
        )
    except ValueError as error:
        raise MeasurementError("bad_row", f"{path.name}, line {number}: {error}.", "Correct or remove it.") from error


def _unstated_kv_dtype(row: dict[str, str]) -> str:
    """NVIDIA's FP8 checkpoints declare FP8 keys and values; TensorRT-LLM's FP8 sweeps have room only so."""
    declared = row["model"].startswith("nvidia/") and row["precision"] == "fp8"
    swept = row["engine"] == "trtllm" and row["precision"] == "fp8" and row["length_rule"] == "fixed"
    return "fp8" if declared or swept else "bf16"


def prepare(measurement: Measurement) -> Case:
    """What to simulate and price for a row. Raises a PhalanxError that names what is unknown."""
    spec = _spec(measurement)
    machine = Machine((Gpu.named(measurement.gpu),) * measurement.tp)
    found = profile(measurement.engine, measurement.version)
    rules, workload = _rules(measurement, found), _workload(measurement)
    work = count_work(spec, measurement.tp, spec.number_format, measurement.kv_dtype)
    traits = traits_of(
        spec,
        found.fitted_as,
        measurement.version,
        machine.gpus[0].name,
        measurement.tp,
        measurement.ep,
        workload,
    )
    return Case(
        measurement,
        found,
        rules,
        workload,
        _kv_tokens(spec, machine, measurement, min(rules.max_sequences, workload.concurrency)),
        Roofline(work, machine.gpus[0], machine.link(measurement.tp), found.all_reduce),
        traits,
    )


def _spec(measurement: Measurement) -> ModelSpec:
    spec = catalog.model(measurement.model)
    wanted = measurement.precision
    if wanted == "fp8" and spec.number_format.startswith("fp8"):
        return spec
    return spec.in_format("fp8-channel" if wanted == "fp8" and spec.number_format == "bf16" else wanted)


def _workload(measurement: Measurement) -> Workload:
    fixed = measurement.has_fixed_lengths and measurement.input_tokens % _LOOSE_SWEEP
    spread = 0.0 if fixed else _UNIFORM_SPREAD
    workload = Workload(measurement.input_tokens, measurement.output_tokens, measurement.concurrency, spread)
    if _sent_all_at_once(measurement):
        everything = 10 * _UNLIMITED_SEQUENCES
        return replace(workload, concurrency=everything, requests=everything)
    return workload


def _sent_all_at_once(measurement: Measurement) -> bool:
    is_inferencex = measurement.engine == "vllm" and not measurement.has_fixed_lengths
    return is_inferencex and measurement.concurrency == _UNLIMITED_CLIENTS


def _rules(measurement: Measurement, found: EngineProfile) -> Rules:
    if _sent_all_at_once(measurement):
        return replace(found.rules, max_sequences=_UNLIMITED_SEQUENCES)
    if measurement.engine == "vllm" and measurement.has_fixed_lengths:
        return replace(found.rules, max_batched_tokens=_SWEEP_BATCHED_TOKENS)
    if measurement.engine == "trtllm" and not measurement.has_fixed_lengths:
        # InferenceX gives TensorRT-LLM a step of one prompt and all decodes.
        room = -(-(measurement.concurrency + measurement.input_tokens + 64) // 64) * 64
        return replace(found.rules, max_batched_tokens=room)
    return found.rules


def _kv_tokens(spec: ModelSpec, machine: Machine, measurement: Measurement, sequences: int) -> int | None:
    """Room of the KV cache where it is short; None where it never runs out or, by our count, nothing fits at all."""
    if spec.latent and measurement.ep > 1:
        return None  # attention is data-parallel then: every rank keeps the latents of its own sequences alone
    longest = measurement.input_tokens + measurement.output_tokens
    fitted = fit(
        spec,
        machine,
        measurement.tp,
        engine_traits(measurement.engine),
        weight_format=spec.number_format,
        kv_format=measurement.kv_dtype,
        context=longest,
        sequences=sequences,
    )
    needed = sequences * (longest + 16)
    return None if fitted.kv_tokens >= needed or fitted.kv_tokens < 2 * longest else fitted.kv_tokens
