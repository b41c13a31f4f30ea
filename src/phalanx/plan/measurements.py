"""Serving measurements as files have them: three layouts, and bad rows named by their line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import PhalanxError
from phalanx.models import catalog
from phalanx.spec.formats import KV_FORMATS

LoadKind = Literal["closed", "offline", "static", "burst", "poisson"]
COLUMNS = (
    *("engine", "version", "gpu", "tp", "ep", "model", "precision", "kv_dtype"),
    *("isl", "osl", "concurrency", "length_rule", "ttft_ms", "tpot_ms"),
)
"""A sweep over closed loops, as InferenceX and NVIDIA publish them."""
INDEPENDENT_COLUMNS = (
    *("source", "kind", "engine", "version", "gpu", "n_gpus", "tp", "model", "format", "kv", "isl", "osl", "spread"),
    *("concurrency", "requests", "rate", "out_tps", "ttft_ms", "tpot_ms", "express", "tier"),
)
"""Anyone's numbers: each row says what kind of run it was, and has what was published of it."""
_KINDS = {"closed": "closed", "decode": "closed", "offline": "offline", "static": "static", "poisson": "poisson"}
_ATTENTION_DP, _PIPELINE, _SPECULATIVE = "attention-DP", "pipeline", "speculative"
_UNIFORM_SPREAD = 0.2
_USUAL_DRAFTS = 3
_LOOSE_SWEEP = 1000
"""NVIDIA sweeps in lengths of round thousands: their times to first token show requests that do not end together."""
_MIX = (256, 100, 1024)
"""Requests, and the shortest and longest prompt and answer, of the case `256xmix`."""
_SHARD = re.compile(r"-tp(\d+)-(?:shard|rank)$")


class MeasurementError(PhalanxError):
    """The file does not hold measurements."""


@dataclass(frozen=True)
class Measurement:
    """One row: a deployment under load, with the mean seconds to the first token and between tokens and the output
    tokens a second of all replicas, as far as they were published.

    `offline`: all requests at once, `concurrency` the most that run. `static`: one batch. `burst`: one batch, its TTFT
    that of the last answer, of one token each, and its TPOT of steps in which all decode. `is_shard`: one rank, alone.
    `attention_ranks`: of the `tp` ranks, so many have sequences of their own and share the experts. `stages`: of a
    pipeline, of `tp` GPUs each. `speculates`: up to `drafts` tokens are guessed ahead by the model's own head or a
    `draft_model`, and come true with the chance `acceptance`; None: as published. `beyond`: what a plan cannot say.
    `line`: of its file.
    """

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
    ttft: float | None
    tpot: float | None
    length_rule: str = ""
    throughput: float | None = None
    kind: LoadKind = "closed"
    spread: float = _UNIFORM_SPREAD
    requests: int | None = None
    rate: float | None = None
    replicas: int = 1
    publisher: str = ""
    tier: str = "current"
    beyond: str = ""
    attention_ranks: int = 1
    stages: int = 1
    speculates: bool = False
    acceptance: float | None = None
    drafts: int = 3
    draft_model: str = ""
    is_shard: bool = False
    state_dtype: str = "auto"
    line: int = field(default=0, compare=False)

    @property
    def batches(self) -> int:
        """How many share the traffic: replicas, the ranks of each that have sequences of their own, and the parts of a
        pipeline.
        """
        return self.replicas * self.attention_ranks * self.stages

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
class BadRow:
    """A line that is no measurement, and why."""

    line: int
    problem: str


@dataclass(frozen=True)
class Reading:
    """A file: its measurements in order, and the lines that are none."""

    measurements: tuple[Measurement, ...]
    bad: tuple[BadRow, ...]


def read_measurements(path: Path) -> Reading:
    """Every row of a CSV in one of the two layouts, or of the lines that `benchmarks/h200.py` writes."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            return _read(enumerate(file, start=1), _from_benchmark)
        reader = csv.DictReader(file)
        found = reader.fieldnames or ()
        layout = _from_independent if "out_tps" in found else _from_sweep
        needed = INDEPENDENT_COLUMNS if "out_tps" in found else COLUMNS
        missing = [column for column in needed if column not in found]
        if missing:
            raise MeasurementError(
                "missing_columns", f"{path.name} has no column {', '.join(missing)}.", f"It needs {', '.join(needed)}."
            )
        return _read(enumerate(reader, start=2), layout)


def _read(lines: Iterable[tuple[int, Any]], layout: Callable[[Any], Measurement | None]) -> Reading:
    measurements, bad = [], []
    for number, line in lines:
        try:
            found = layout(line)
            if found is not None:
                _check(found)
                measurements.append(replace(found, line=number))
        except (ValueError, KeyError, TypeError) as error:
            bad.append(BadRow(number, str(error)))
        except PhalanxError as error:
            bad.append(BadRow(number, error.found))
    return Reading(tuple(measurements), tuple(bad))


def _check(row: Measurement) -> None:
    """Refuse what no run can have been."""
    counts = ("tp", "ep", "input_tokens", "output_tokens", "concurrency", "requests", "replicas", "stages", "drafts")
    for name in (*counts, "ttft", "tpot", "throughput", "rate"):
        value = getattr(row, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value:g}")
    if row.ttft is None and row.tpot is None and row.throughput is None:
        raise ValueError("nothing was measured")
    if row.acceptance is not None and not 0 <= row.acceptance <= 1:
        raise ValueError(f"acceptance is {row.acceptance:g}")
    catalog.check_format(row.precision)
    if row.kv_dtype not in KV_FORMATS:
        raise ValueError(f"KV is not kept as {row.kv_dtype!r} but as {', '.join(KV_FORMATS)}")


def _number(text: str) -> float | None:
    return float(text) if text else None


def _seconds(text: str) -> float | None:
    return float(text) / 1e3 if text else None


def _from_sweep(row: dict[str, str]) -> Measurement:
    fixed = row["length_rule"] == "fixed"
    loose = not fixed or int(row["isl"]) % _LOOSE_SWEEP == 0
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
        ttft=_seconds(row["ttft_ms"]),
        tpot=_seconds(row["tpot_ms"]),
        length_rule="fixed" if fixed else "uniform",
        spread=_UNIFORM_SPREAD if loose else 0.0,
        stages=int(row.get("pp") or 1),
        publisher=(row.get("source") or ("NVIDIA sweep" if fixed else "InferenceX")).rpartition(": ")[2],
    )


def _unstated_kv_dtype(row: dict[str, str]) -> str:
    """NVIDIA's FP8 checkpoints declare FP8 keys and values; TensorRT-LLM's FP8 sweeps have room only so. InferenceX
    keeps them so where its scripts say it (`benchmarks/single_node/*.sh`, read 2026-11-17).
    """
    engine, precision, is_sweep = row["engine"], row["precision"], row["length_rule"] == "fixed"
    declared = row["model"].startswith("nvidia/") and precision == "fp8"
    swept = engine == "trtllm" and precision == "fp8" and is_sweep
    is_blackwell, is_deepseek = row["gpu"].startswith("B200"), "DeepSeek" in row["model"]
    told = {
        "sglang": (is_blackwell and precision != "bf16") or ("Qwen3.5" in row["model"] and precision == "fp8"),
        "trtllm": is_blackwell or is_deepseek,
    }
    return "fp8" if declared or swept or (not is_sweep and told.get(engine)) else "bf16"


def _from_independent(row: dict[str, str]) -> Measurement:
    if row["kind"] not in _KINDS:
        raise ValueError(f"no kind of run is called {row['kind']!r}; known: {', '.join(_KINDS)}")
    requests = int(row["requests"]) if row["requests"] else None
    tp, gpus, regime = int(row["tp"]), int(row["n_gpus"]), row["express"]
    stages = int(row.get("pp") or (gpus // tp if regime == _PIPELINE else 1))
    return Measurement(
        engine=row["engine"],
        version="0" if row["version"].startswith("20") else row["version"],  # a year: before any version that is known
        gpu=row["gpu"],
        tp=tp,
        ep=1,
        model=row["model"],
        precision=row["format"],
        kv_dtype=row["kv"] or "bf16",
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=int(row["concurrency"] or 1),
        ttft=_seconds(row["ttft_ms"]),
        tpot=_seconds(row["tpot_ms"]),
        throughput=_number(row["out_tps"]),
        kind=_KINDS[row["kind"]],  # type: ignore[arg-type]
        spread=float(row["spread"] or 0),
        requests=requests,
        rate=_number(row["rate"]),
        replicas=gpus // (tp * stages),
        publisher=row["source"],
        tier=row["tier"],
        beyond="" if regime in ("yes", _ATTENTION_DP, _PIPELINE, _SPECULATIVE) else regime,
        attention_ranks=tp if regime == _ATTENTION_DP else 1,
        stages=stages,
        speculates=regime == _SPECULATIVE,
        acceptance=_number(row.get("acceptance") or ""),
        drafts=int(row.get("drafts") or _USUAL_DRAFTS),
        draft_model=row.get("draft_model") or "",
    )


def _from_benchmark(line: str) -> Measurement | None:
    """A case of `benchmarks/h200.py`; lines of other facts, and runs whose requests all choose the same experts, are
    passed over.
    """
    told = json.loads(line)
    if "case" not in told or "prompts" in told:
        return None
    shard = _SHARD.search(told["model"])
    name = _SHARD.sub("", told["model"])
    common: dict[str, Any] = {
        "engine": told["engine"].partition(" ")[0],
        "version": told["engine"].partition(" ")[2],
        "gpu": "H200-SXM",
        "tp": int(shard[1]) if shard else 1,
        "ep": 1,
        "model": name,
        "precision": catalog.model(name).number_format,
        "kv_dtype": "bf16",
        "throughput": told.get("out_tok_s"),
        "publisher": "phalanx",
        "is_shard": shard is not None,
    }
    if "tpot_ms" not in told:
        requests, shortest, longest = _MIX
        sizes: dict[str, Any] = {
            "input_tokens": longest,
            "output_tokens": longest,
            "concurrency": requests,
            "requests": requests,
        }
        times: dict[str, Any] = {"ttft": None, "tpot": None, "spread": 1 - shortest / longest}
        return Measurement(**common, **sizes, **times, kind="offline")
    batch, inputs, outputs = (int(part) for part in told["case"].split("x"))
    sizes = {"input_tokens": inputs, "output_tokens": outputs, "concurrency": batch, "requests": batch}
    times = {"ttft": told.get("prefill_s"), "tpot": told["tpot_ms"] / 1e3, "spread": 0.0}
    return Measurement(**common, **sizes, **times, kind="burst")
