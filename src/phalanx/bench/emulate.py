"""`phalanx bench offline --emulate-tp`: the TP scaling lab on one device.

One rank's real share of the model runs with the real engine; collectives are a modelled delay on the device's queue.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from phalanx.bench.offline import (
    Speculated,
    check_acceptance,
    table_of_drafts,
    time_both,
    with_room_for,
)
from phalanx.bench.timing import FixedBatch, Timing
from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.errors import ConfigError
from phalanx.fabric.emulated import EmulatedGroup
from phalanx.fabric.group import Group, Solo
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import pick_device, pick_dtype
from phalanx.runtime.start import start_engine
from phalanx.spec import ModelSpec
from phalanx.spec.machine import Gpu, Machine, MachineError
from phalanx.version import __version__
from phalanx.weights.checkpoint import Checkpoint, locate, model_name

SecondsOf = Callable[[int], float]


@dataclass(frozen=True)
class Scaled:
    """A case at one TP degree: milliseconds of a decode step, and where they go. `tok_s` are the answers' tokens over
    the whole run; efficiency is those of a GPU against the smallest degree that was run.
    """

    tp: int
    case: str
    tpot_ms: float
    compute_ms: float
    all_reduce_ms: float
    tok_s: float
    tok_s_per_gpu: float
    efficiency: float
    prefill_tok_s: float
    speculated: Speculated | None = None


def emulate(
    asked: EngineConfig,
    cases: str,
    degrees: str,
    all_reduce_us: float | None,
    machine: str | None,
    repeats: int,
    output: Path | None,
    acceptance: float | None = None,
) -> list[Scaled]:
    """Time every case at every TP degree, print a table, and write JSON if asked to. With an `acceptance`, time them
    with drafts too.
    """
    check_acceptance(asked, acceptance)
    parsed, tps = [FixedBatch.parse(text) for text in cases.split(",")], parse_degrees(degrees, "--emulate-tp")
    path, console = locate(asked.model), Console()
    spec, config = Checkpoint(path, asked.load_format).spec, with_room_for(asked, parsed)
    device = pick_device(config, 0)
    results: list[Scaled] = []
    for tp in tps:
        seconds_of, fabric = fabric_of(tp, all_reduce_us, machine, device)
        group: Group = EmulatedGroup(tp, seconds_of, device) if tp > 1 else Solo()
        with console.status(f"Loading rank 0 of {tp}"):
            engine = start_engine(config, path, lambda done, total: None, group)
        try:
            for case in parsed:
                with console.status(f"Running {case} at TP={tp}"):
                    timing, speculated = time_both(engine, case, repeats, acceptance)
                waited = step_collectives(spec, case.batch, pick_dtype(config, spec, device).itemsize, seconds_of)
                scaled = _scaled(tp, case, timing, waited if tp > 1 else 0.0, results)
                results.append(replace(scaled, speculated=speculated))
        finally:
            engine.close()
            del engine
            free_memory(device)
    console.print(_table(f"{model_name(path)}, one rank of TP on this device; all-reduces {fabric}", results))
    if drafts := table_of_drafts([(f"{each.case}, TP={each.tp}", each.tpot_ms, each.speculated) for each in results]):
        console.print(drafts)
    if output is not None:
        output.write_text(json.dumps(_record(path, fabric, device, results), indent=1) + "\n")
    return results


def free_memory(device: torch.device) -> None:
    """Give back what an engine held that nobody refers to any more: the next one wants the room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _scaled(tp: int, case: FixedBatch, timing: Timing, waited: float, before: list[Scaled]) -> Scaled:
    tpot, tok_s = timing.tpot, case.batch * case.outputs / timing.whole
    per_gpu = tok_s / tp
    smallest = next((each.tok_s_per_gpu for each in before if each.case == str(case)), per_gpu)
    return Scaled(
        tp=tp,
        case=str(case),
        tpot_ms=tpot * 1e3,
        compute_ms=(tpot - waited) * 1e3,
        all_reduce_ms=waited * 1e3,
        tok_s=tok_s,
        tok_s_per_gpu=per_gpu,
        efficiency=per_gpu / smallest,
        prefill_tok_s=case.batch * case.inputs / timing.first,
    )


def step_collectives(
    spec: ModelSpec, rows: int, element: int, seconds_of: SecondsOf, gathered: int | None = None
) -> float:
    """Seconds a step of so many rows waits: an all-reduce behind the embedding and two a layer, and the logits gathered
    of those that yield a token, all by default.
    """
    logits = (rows if gathered is None else gathered) * spec.vocab * element
    sums = (2 * len(spec.layers) + 1) * seconds_of(rows * spec.hidden * element)
    return sums + (seconds_of(logits) if logits else 0.0)


def parse_degrees(text: str, option: str) -> list[int]:
    degrees = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= degree <= 64 for degree in degrees):
        raise ConfigError("bad_option", f"{option} is {text!r}.", "Write TP degrees as 2,4,8.")
    return sorted(set(degrees))


def fabric_of(tp: int, fixed_us: float | None, machine: str | None, device: torch.device) -> tuple[SecondsOf, str]:
    """How long a collective of so many bytes takes, and where that is from."""
    if fixed_us is not None:
        return lambda size: fixed_us / 1e6, f"of {fixed_us:g} us each, as told"
    gpu = _gpu(machine, device)
    link = Machine((gpu,) * tp).link(tp)
    name = f"as modelled for {gpu.name} over {link.kind}"
    return lambda size: all_reduce_seconds(size, tp, link, "nccl"), name


def _gpu(machine: str | None, device: torch.device) -> Gpu:
    if machine is not None:
        return Machine.parse(machine).gpus[0]
    try:
        return Gpu.named(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU")
    except MachineError as error:
        raise ConfigError(
            "no_fabric",
            f"{error.found} The time of its all-reduces is not known.",
            "Name a machine whose fabric to model with --machine H100-SXM, or give --all-reduce-us.",
        ) from None


def _table(title: str, results: list[Scaled]) -> Table:
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for name in ("TP", "TPOT ms", "compute", "all-reduce", "tok/s", "per GPU", "scaling", "prefill"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in results:
        table.add_row(
            each.case,
            str(each.tp),
            f"{each.tpot_ms:.2f}",
            f"{each.compute_ms:.2f}",
            f"{each.all_reduce_ms:.2f}",
            f"{each.tok_s:,.1f}",
            f"{each.tok_s_per_gpu:,.1f}",
            f"{each.efficiency:.0%}",
            f"{each.prefill_tok_s:,.0f}",
        )
    return table


def _record(path: Path, fabric: str, device: torch.device, results: list[Scaled]) -> dict[str, object]:
    return {
        "model": model_name(path),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "fabric": fabric,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "phalanx": __version__,
        "torch": torch.__version__,
        "results": [asdict(result) for result in results],
    }
