"""What a machine does, measured: rates of each device, all-reduces over real ranks, whether their sums are right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.doctor.facts import AllReduce, Corruption, Facts, GpuFacts, Measured, Rate
from phalanx.doctor.measure.calibration import save_calibration
from phalanx.doctor.measure.messages import Checked, DeviceKind, Rated, Timed
from phalanx.doctor.measure.ranks import RankProblem, Ranks
from phalanx.errors import ConfigError
from phalanx.spec.machine import Gpu, Machine, MachineError

__all__ = ["measure", "save_calibration"]

_CPU_RANKS = 2
_MOST_RANKS = 64


def measure(facts: Facts, ranks: int | None = None, progress: Callable[[str], None] = lambda words: None) -> Measured:
    """Measure this machine, in seconds. Raises nothing that happens on it: see `Measured.problem`.

    All-reduces run over `ranks`; None: over 2, 4, 8 and so on up to every GPU, or 2 ranks on the CPU.
    """
    gpus = facts.software.torch_sees_gpus if facts.software.torch_sees_gpus is not None else len(facts.gpus)
    if facts.gpus and not gpus:
        return Measured(problem=f"torch sees none of the {len(facts.gpus)} GPUs, so nothing was measured.")
    counts = _rank_counts(gpus, ranks)
    found = _Found(facts, "cuda" if gpus else "cpu")
    try:
        progress(f"copies and matrix products on {f'{gpus} GPUs' if gpus else 'the CPU'}")
        found.rate(gpus or 1)
        for count in counts:
            progress(f"all-reduces over {count} ranks")
            found.reduce(count)
    except RankProblem as problem:
        return found.measured(str(problem))
    return found.measured(None)


def _rank_counts(gpus: int, asked: int | None) -> list[int]:
    if asked is None and gpus:
        return [count for count in range(2, gpus + 1) if count == gpus or count & (count - 1) == 0]
    if asked is None:
        return [_CPU_RANKS]
    most = gpus or _MOST_RANKS
    if not 1 <= asked <= most:
        raise ConfigError("bad_ranks", f"{asked} ranks are asked for.", f"Use 1 to {most} on this machine.")
    return [asked] if asked > 1 else []


@dataclass
class _Found:
    """What ranks have reported so far; it stays when one of them fails later."""

    facts: Facts
    device: DeviceKind
    rated: dict[int, Rated] = field(default_factory=dict)
    times: defaultdict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    checks: defaultdict[tuple[int, int], dict[int, Checked]] = field(default_factory=lambda: defaultdict(dict))

    def rate(self, count: int) -> None:
        with Ranks("rates", self.device, count) as ranks:
            for rank, report in ranks.reports():
                if isinstance(report, Rated):
                    self.rated[rank] = report

    def reduce(self, count: int) -> None:
        with Ranks("all-reduce", self.device, count) as ranks:
            for rank, report in ranks.reports():
                if isinstance(report, Timed):
                    self.times[count, report.size].append(report.microseconds)
                elif isinstance(report, Checked):
                    self.checks[count, report.round][rank] = report

    def measured(self, problem: str | None) -> Measured:
        return Measured(
            rates=tuple(self._rate(rank) for rank in sorted(self.rated)),
            backend=None if not self.times else "nccl" if self.device == "cuda" else "gloo",
            all_reduces=tuple(self._all_reduce(*key) for key in self.times),
            checked_bytes=sum(check.size for by_rank in self.checks.values() for check in by_rank.values()),
            corruptions=tuple(corruption for by_rank in self.checks.values() for corruption in corrupt(by_rank)),
            problem=problem,
        )

    def _rate(self, rank: int) -> Rate:
        rated = self.rated[rank]
        products = rated.matmul_tflops
        if self.device == "cpu":
            return Rate(-1, self.facts.system.cpu or rated.device, rated.copy_gbs, products["fp32"], "fp32")
        gpu = self._gpu(rank)
        index, name = (gpu.index, gpu.name) if gpu else (rank, rated.device)
        sheet = datasheet(name)
        return Rate(
            gpu=index,
            device=name,
            copy_gbs=rated.copy_gbs,
            matmul_tflops=products["bf16"],
            datasheet_gbs=sheet.bandwidth / 1e9 if sheet else None,
            datasheet_tflops=_peak_tflops(sheet, "bf16"),
            fp8_tflops=products.get("fp8"),
            datasheet_fp8_tflops=_peak_tflops(sheet, "fp8"),
        )

    def _gpu(self, rank: int) -> GpuFacts | None:
        """CUDA may count GPUs in another order than the driver, so they are known by their UUID."""
        uuid = self.rated[rank].uuid
        return next((gpu for gpu in self.facts.gpus if gpu.uuid and gpu.uuid.removeprefix("GPU-") == uuid), None)

    def _all_reduce(self, ranks: int, size: int) -> AllReduce:
        """The slowest rank counts: the others wait for it."""
        microseconds = max(self.times[ranks, size])
        bus_gbs = size / (microseconds * 1e-6) * 2 * (ranks - 1) / ranks / 1e9
        return AllReduce(size, ranks, microseconds, bus_gbs, self._modelled(ranks, size))

    def _modelled(self, ranks: int, size: int) -> float | None:
        names = [self._rate(rank).device for rank in range(ranks)] if self.device == "cuda" else []
        sheets = [sheet for sheet in map(datasheet, names) if sheet is not None]
        if len(sheets) < ranks:
            return None
        return all_reduce_seconds(size, ranks, Machine(tuple(sheets)).link(ranks), "nccl") * 1e6


def datasheet(name: str) -> Gpu | None:
    """What the catalogue says of a GPU by its driver's name."""
    try:
        return Gpu.named(name)
    except MachineError:
        return None


def _peak_tflops(sheet: Gpu | None, number_format: str) -> float | None:
    return sheet.peaks[number_format] / 1e12 if sheet and number_format in sheet.peaks else None


def corrupt(by_rank: dict[int, Checked]) -> list[Corruption]:
    """The ranks whose sum is not the right one: by its numbers, and by its checksum against what most ranks expect."""
    right, _ = Counter(check.expected for check in by_rank.values()).most_common(1)[0]
    return [
        Corruption(rank, check.size, check.round)
        for rank, check in sorted(by_rank.items())
        if check.wrong or check.checksum != right
    ]
