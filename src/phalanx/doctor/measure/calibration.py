"""From a measurement to a calibration that `phalanx plan` uses."""

from __future__ import annotations

from pathlib import Path

from phalanx.doctor.facts import AllReduce, Facts, Measured, Rate
from phalanx.spec.calibration import AllReduceTimes, Calibration, CalibrationError, GpuShare
from phalanx.spec.machine import Gpu, Machine


def save_calibration(measured: Measured, facts: Facts, path: Path) -> Calibration:
    """Write what the planner needs of a measurement. What it cannot trust or use is refused."""
    calibration = calibrate(measured, facts)
    calibration.write(path)
    return calibration


def calibrate(measured: Measured, facts: Facts) -> Calibration:
    """Shares of the datasheet by GPU, and all-reduce times by ranks and size."""
    if measured.corruptions:
        ranks = sorted({each.rank for each in measured.corruptions})
        raise CalibrationError(
            "corrupt_sums",
            f"All-reduces gave wrong sums on ranks {', '.join(map(str, ranks))}.",
            "Repair the machine first: phalanx doctor --measure says more.",
        )
    if measured.problem is not None:
        raise CalibrationError(
            "not_measured",
            f"The measurement did not end: {measured.problem}",
            "Repair what it names, then measure again.",
        )
    gpus = tuple(_share(rate) for rate in sorted(measured.rates, key=lambda rate: rate.gpu) if rate.datasheet_gbs)
    if not gpus or len(gpus) < len(measured.rates):
        raise CalibrationError(
            "no_datasheet",
            "Not every device that was measured is a GPU of the catalogue, spec/gpus.toml.",
            "The planner plans for GPUs that it knows the datasheet of: measure such a machine, or add the GPU there.",
        )
    return Calibration(
        date=facts.recorded_at,
        machine=Machine(tuple(Gpu.named(gpu.name) for gpu in gpus)).name,
        host=facts.system.hostname,
        source=_source(facts),
        gpus=gpus,
        all_reduces=_tables(measured.all_reduces),
    )


def _share(rate: Rate) -> GpuShare:
    bandwidth = _of(rate.copy_gbs, rate.datasheet_gbs)
    assert bandwidth is not None
    bf16 = _of(rate.matmul_tflops, rate.datasheet_tflops)
    return GpuShare(
        rate.gpu, Gpu.named(rate.device).name, bandwidth, bf16, _of(rate.fp8_tflops, rate.datasheet_fp8_tflops)
    )


def _of(reached: float | None, promised: float | None) -> float | None:
    return reached / promised if reached and promised else None


def _source(facts: Facts) -> str:
    software = facts.software
    known = {"driver": software.driver, "torch": software.torch, "NCCL": software.nccl}
    versions = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    return f"phalanx doctor --measure ({versions})" if versions else "phalanx doctor --measure"


def _tables(all_reduces: tuple[AllReduce, ...]) -> tuple[AllReduceTimes, ...]:
    by_ranks: dict[int, list[AllReduce]] = {}
    for each in sorted(all_reduces, key=lambda each: (each.ranks, each.size)):
        by_ranks.setdefault(each.ranks, []).append(each)
    return tuple(
        AllReduceTimes(ranks, tuple(each.size for each in row), tuple(each.microseconds for each in row))
        for ranks, row in by_ranks.items()
    )
