"""`phalanx bench offline`: fixed batches through the engine, no server, no text."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from phalanx.bench.ceilings import Ceilings, measure_ceilings
from phalanx.bench.forced import AllDrafts, ForcedSpeculation
from phalanx.bench.timing import FixedBatch, Timing, time_case, time_requests
from phalanx.cost.work import RankWork, count_work
from phalanx.engine.core import Engine
from phalanx.errors import ConfigError
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.held import HeldWeights, held_weights
from phalanx.runtime.rank import pick_device, pick_dtype
from phalanx.runtime.start import start_engine
from phalanx.spec import ModelSpec
from phalanx.spec.formats import DTYPE_NAMES
from phalanx.version import __version__
from phalanx.weights.checkpoint import Checkpoint, locate, model_name

_WARM_STEPS = 16


@dataclass(frozen=True)
class Result:
    """A case's speeds, each beside its share of what the machine's ceilings allow.

    `tok_s` are the answers' tokens over the whole run; decodes are those of the steps in which all requests decode, and
    `clocks_ms` is TPOT by those steps' own clocks.
    """

    case: str
    prefill_tok_s: float
    prefill_share: float
    tpot_ms: float
    clocks_ms: float
    decode_tok_s: float
    decode_share: float
    tok_s: float
    speculated: Speculated | None = None


@dataclass(frozen=True)
class Speculated:
    """The same case with drafts: milliseconds between tokens and of a step, drafts that came true of those that were
    made, the share of the time that making them took.
    """

    tpot_ms: float
    step_ms: float
    accepted: int
    drafts: int
    draft_share: float


def least_work(spec: ModelSpec, held: HeldWeights, config: EngineConfig, device: torch.device) -> RankWork:
    """What one device does at least, with weights in the bits that are `held`: for one rank, or for all."""
    plain = DTYPE_NAMES[str(pick_dtype(config, spec, device)).removeprefix("torch.")]
    cached = "fp8" if config.kv_cache_dtype == "fp8" else plain
    kept = spec.keeping_states_in(config.state_dtype)
    work = count_work(kept, config.tp if held.ranks == 1 else 1, spec.number_format, cached)
    stacks = work.experts * work.sparse_layers
    return dataclasses.replace(
        work,
        linear_bytes=float(held.linear),
        expert_bytes=held.experts / stacks if stacks else 0.0,
        head_bytes=float(held.head),
    )


def run_cases(
    asked: EngineConfig, cases: str, repeats: int, output: Path | None, acceptance: float | None = None
) -> list[Result]:
    """Time every case, print a table, and write JSON if asked to. With an `acceptance`, time them with drafts too."""
    check_acceptance(asked, acceptance)
    parsed = [FixedBatch.parse(text) for text in cases.split(",")]
    console, path, tp = Console(), locate(asked.model), asked.tp
    config = with_room_for(asked, parsed)
    checkpoint, device = Checkpoint(path, config.load_format), pick_device(config, 0)
    held = held_weights(config, checkpoint, device, all_ranks=device.type == "cpu")
    work = least_work(checkpoint.spec, held, config, device)
    with console.status("Measuring the machine"):
        ceilings = measure_ceilings(device, pick_dtype(config, checkpoint.spec, device), held.scheme)
    began = time.perf_counter()
    with console.status(f"Loading {model_name(path)}, TP={tp}"):
        engine = start_engine(config, path, progress=lambda done, total: None)
    loaded = time.perf_counter() - began
    try:
        results = []
        for case in parsed:
            with console.status(f"Running {case}"):
                timing, speculated = time_both(engine, case, repeats, acceptance)
                result = summarise(case, timing, work, ceilings, on_gpu=device.type == "cuda")
                results.append(dataclasses.replace(result, speculated=speculated))
    finally:
        engine.close()
    console.print(_table(f"{model_name(path)}, TP={tp}, loaded in {loaded:.1f} s", results, ceilings))
    if drafts := table_of_drafts([(result.case, result.tpot_ms, result.speculated) for result in results]):
        console.print(drafts)
    if output is not None:
        output.write_text(json.dumps(_record(path, config, loaded, ceilings, results), indent=1) + "\n")
    return results


def check_acceptance(config: EngineConfig, acceptance: float | None) -> None:
    if acceptance is None and config.speculate != "off":
        raise ConfigError("bad_option", "speculate is given without an acceptance.", "Add --acceptance, such as 0.8.")
    if acceptance is not None and (config.speculate == "off" or not 0 <= acceptance <= 1):
        raise ConfigError(
            "bad_option",
            f"acceptance is {acceptance} with speculate {config.speculate}.",
            "It is a share from 0 to 1, and wants --speculate mtp, ngram or a draft model.",
        )


def with_room_for(asked: EngineConfig, cases: Sequence[FixedBatch]) -> EngineConfig:
    """Limits that the cases just fit, each request with its drafts."""
    tokens = 1 + asked.drafts
    return msgspec.structs.replace(
        asked,
        max_num_seqs=max(case.batch for case in cases) * tokens,
        max_model_len=max(case.inputs + case.outputs for case in cases),
        prefix_caching=False,
    )


def time_both(
    engine: Engine, case: FixedBatch, repeats: int, acceptance: float | None
) -> tuple[Timing, Speculated | None]:
    """Without drafts, and with such of which a given share comes true."""
    speculation = engine.scheduler.speculation
    engine.scheduler.speculation = None
    timing = time_case(engine, case, repeats)
    if speculation is None or acceptance is None:
        return timing, None
    by_ranks = speculation.by_ranks
    _warm_up_drafts(engine, case, speculation.most, acceptance, by_ranks)
    told = [
        _time_with_drafts(engine, case, run, ForcedSpeculation(speculation.most, acceptance, by_ranks))
        for run in range(repeats)
    ]
    engine.scheduler.speculation = speculation
    return timing, min(told, key=lambda each: each.tpot_ms)


def _warm_up_drafts(engine: Engine, case: FixedBatch, most: int, acceptance: float, by_ranks: bool) -> None:
    """Rows of every length, and then as many as pay, which nobody times: no step that is timed builds a kernel, and
    hardly one waits for a graph.
    """
    for drafts in range(1, most + 1):
        engine.scheduler.speculation = AllDrafts(drafts, acceptance, by_ranks)
        time_requests(engine, [(case.inputs, min(case.outputs, drafts * _WARM_STEPS))] * case.batch, seed=0)
    engine.scheduler.speculation = ForcedSpeculation(most, acceptance, by_ranks)
    time_requests(engine, [(case.inputs, case.outputs)] * case.batch, seed=0)


def _time_with_drafts(engine: Engine, case: FixedBatch, run: int, forced: ForcedSpeculation) -> Speculated:
    engine.scheduler.speculation = forced
    timing = time_requests(engine, [(case.inputs, case.outputs)] * case.batch, run)
    totals = forced.totals
    return Speculated(
        tpot_ms=timing.tpot * 1e3,
        step_ms=timing.decode / timing.steps * 1e3,
        accepted=totals.accepted_tokens,
        drafts=totals.draft_tokens,
        draft_share=timing.decode_clocks.draft / timing.decode,
    )


def summarise(case: FixedBatch, timing: Timing, work: RankWork, ceilings: Ceilings, on_gpu: bool) -> Result:
    tpot = timing.tpot
    return Result(
        case=str(case),
        prefill_tok_s=case.batch * case.inputs / timing.first,
        prefill_share=ceilings.seconds(0, work.flops_of(case.prompts)) / timing.first,
        tpot_ms=tpot * 1e3,
        clocks_ms=timing.clocked(on_gpu) * 1e3,
        decode_tok_s=case.batch / tpot,
        decode_share=ceilings.seconds(work.bytes_of(case.decode_step), work.flops_of(case.decode_step)) / tpot,
        tok_s=case.batch * case.outputs / timing.whole,
    )


def _table(title: str, results: list[Result], ceilings: Ceilings) -> Table:
    caption = (
        f"{ceilings.device}: {ceilings.bytes_per_s / 1e9:.1f} GB/s, {ceilings.flops_per_s / 1e9:.0f} GFLOP/s measured"
    )
    table = Table(title=title, caption=caption)
    table.add_column("case")
    for name in ("prefill tok/s", "of limit", "TPOT ms", "decode tok/s", "of limit", "whole tok/s"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.case,
            f"{result.prefill_tok_s:,.0f}",
            f"{result.prefill_share:.0%}",
            f"{result.tpot_ms:.2f}",
            f"{result.decode_tok_s:,.1f}",
            f"{result.decode_share:.0%}",
            f"{result.tok_s:,.1f}",
        )
    return table


def table_of_drafts(told: Sequence[tuple[str, float, Speculated | None]]) -> Table | None:
    """Cases by name, with their TPOT without drafts; None where nobody drafted."""
    table = Table(title="With drafts")
    table.add_column("case", no_wrap=True)
    for name in ("TPOT ms", "without", "speed-up", "step ms", "making them", "came true"):
        table.add_column(name, justify="right")
    for case, plain_ms, drafted in told:
        if drafted is not None:
            table.add_row(
                case,
                f"{drafted.tpot_ms:.2f}",
                f"{plain_ms:.2f}",
                f"{plain_ms / drafted.tpot_ms:.2f}x",
                f"{drafted.step_ms:.2f}",
                f"{drafted.draft_share:.0%}",
                f"{drafted.accepted / max(1, drafted.drafts):.0%}",
            )
    return table if table.row_count else None


def _record(
    path: Path, config: EngineConfig, loaded: float, ceilings: Ceilings, results: list[Result]
) -> dict[str, object]:
    return {
        "model": model_name(path),
        "tp": config.tp,
        "kv_cache_dtype": config.kv_cache_dtype,
        "state_dtype": config.state_dtype,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "phalanx": __version__,
        "torch": torch.__version__,
        "load_s": loaded,
        "machine": asdict(ceilings),
        "results": [asdict(result) for result in results],
    }
