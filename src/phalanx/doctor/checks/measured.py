"""What `--measure` found, against the data sheet and the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from phalanx.doctor.facts import AllReduce, Facts, Rate
from phalanx.doctor.finding import Finding

_COPY_SHARE = 0.75
"""Of the data sheet's bandwidth; sound cards reach 0.85 and more."""
_MATMUL_SHARE = 0.5
"""Of the data sheet's dense rate; sound cards reach 0.6 to 0.8 at their usual clocks."""
_FP8_GAIN = 1.3
_STRAGGLER_SHARE = 0.9
_MODEL_FACTOR = 2.0
_TIME_OUTS = ("timed out", "timeout", "time-out", "watchdog")


def looks_like_timeout(text: str) -> bool:
    return any(word in text.lower() for word in _TIME_OUTS)


def problem(facts: Facts) -> Finding | None:
    """The measurement itself did not come to its end."""
    measured = facts.measured
    if measured is None or not measured.problem or looks_like_timeout(measured.problem):
        return None
    return Finding(
        "error",
        "measuring",
        "The measurement failed",
        measured.problem,
        "What a short test cannot do, serving cannot do either.",
        "Mend the other findings first, then measure again with NCCL_DEBUG=INFO.",
    )


def corruption(facts: Facts) -> Finding | None:
    """Sums that differ between ranks: nothing this machine computes can be trusted."""
    measured = facts.measured
    if measured is None:
        return None
    if measured.corruptions:
        ranks = sorted({each.rank for each in measured.corruptions})
        sizes = sorted({each.size for each in measured.corruptions})
        return Finding(
            "error",
            "corruption",
            "All-reduce gives wrong sums",
            f"{len(measured.corruptions)} of the sums of rank {', '.join(map(str, ranks))} differ from the others', at "
            f"{', '.join(map(str, sizes))} bytes",
            "Answers are wrong without any error: a bad link, switch firmware, an IOMMU in the way of peer access, or "
            "memory that fails.",
            "Serve nothing here. Update NVSwitch firmware and driver together, look at NVLink errors and Xids, turn "
            "the "
            "IOMMU off; NCCL_P2P_DISABLE=1 tells links from memory. Then measure again.",
        )
    if measured.checked_bytes and not measured.problem:
        return Finding(
            "ok",
            "corruption",
            "All-reduce sums",
            f"the same on every rank over {measured.checked_bytes / 2**20:,.0f} MiB of random numbers",
        )
    return None


def _where(rate: Rate) -> str:
    return "processor" if rate.gpu < 0 else f"GPU {rate.gpu}"


def memory_rate(facts: Facts) -> Finding | None:
    """Memory bandwidth against the data sheet's."""
    told = [(rate, rate.datasheet_gbs) for rate in _rates(facts) if rate.datasheet_gbs]
    slow = [(rate, sheet) for rate, sheet in told if rate.copy_gbs < _COPY_SHARE * sheet]
    if slow:
        return Finding(
            "warning",
            "memory_rate",
            "Memory is slower than it should be",
            ", ".join(f"{_where(rate)}: {rate.copy_gbs:.0f} of {sheet:.0f} GB/s" for rate, sheet in slow),
            "Decoding reads all weights every step: it is slower by as much.",
            "Look for another program on the card, throttling, MIG and ECC; then compare with a card of the same kind.",
        )
    if told:
        least = min(rate.copy_gbs / sheet for rate, sheet in told)
        return Finding("ok", "memory_rate", "Memory bandwidth", f"at least {least:.0%} of the data sheet's")
    return None


def matmul_rate(facts: Facts) -> Finding | None:
    """Matrix rate against the data sheet's."""
    told = [(rate, rate.datasheet_tflops) for rate in _rates(facts) if rate.datasheet_tflops]
    slow = [(rate, sheet) for rate, sheet in told if rate.matmul_tflops < _MATMUL_SHARE * sheet]
    if slow:
        return Finding(
            "warning",
            "matmul_rate",
            "Matrix products are slower than they should be",
            ", ".join(
                f"{_where(rate)}: {rate.matmul_tflops:.0f} of {sheet:.0f} TFLOP/s in {rate.matmul_format}"
                for rate, sheet in slow
            ),
            "Prefill is slower by as much.",
            "Look at power limit, heat and clocks while it runs: nvidia-smi -q -d CLOCK,PERFORMANCE.",
        )
    if told:
        least = min(rate.matmul_tflops / sheet for rate, sheet in told)
        return Finding("ok", "matmul_rate", "Matrix rate", f"at least {least:.0%} of the data sheet's")
    return None


def fp8_rate(facts: Facts) -> Finding | None:
    """FP8 against bf16 on cards whose data sheet promises twice as much."""
    promised = [rate for rate in _rates(facts) if rate.datasheet_fp8_tflops and rate.matmul_tflops > 0]
    told = [(rate, rate.fp8_tflops) for rate in promised if rate.fp8_tflops]
    slow = [(rate, found) for rate, found in told if found < _FP8_GAIN * rate.matmul_tflops]
    if slow:
        return Finding(
            "warning",
            "fp8_rate",
            "FP8 products are no faster than bf16",
            ", ".join(f"{_where(rate)}: {found:.0f} TFLOP/s, bf16 {rate.matmul_tflops:.0f}" for rate, found in slow),
            "Its data sheet promises twice bf16: prefill gains nothing from FP8 weights, only memory is saved.",
            "Look at the power limit and at clocks under load; update torch and the driver, whose libraries bring the "
            "FP8 kernels.",
        )
    if told:
        least = min(found / rate.matmul_tflops for rate, found in told)
        return Finding("ok", "fp8_rate", "FP8 rate", f"at least {least:.1f} x bf16's")
    return None


def straggler(facts: Facts) -> Finding | None:
    """A card that is slower than its equals holds all of them up."""
    rates = [rate for rate in _rates(facts) if rate.gpu >= 0]
    if len(rates) < 2 or len({rate.device for rate in rates}) > 1:
        return None
    copy, matmul = median(rate.copy_gbs for rate in rates), median(rate.matmul_tflops for rate in rates)
    slow = [
        rate
        for rate in rates
        if rate.copy_gbs < _STRAGGLER_SHARE * copy or rate.matmul_tflops < _STRAGGLER_SHARE * matmul
    ]
    if not slow:
        return None
    return Finding(
        "warning",
        "straggler",
        "One card is slower than its equals",
        ", ".join(f"GPU {rate.gpu}: {rate.copy_gbs:.0f} GB/s, {rate.matmul_tflops:.0f} TFLOP/s" for rate in slow)
        + f"; the middle is {copy:.0f} GB/s, {matmul:.0f} TFLOP/s",
        "Every step of a tensor-parallel group takes as long as its slowest rank.",
        "Compare its temperature, power limit and clocks with the others'.",
    )


def _rates(facts: Facts) -> tuple[Rate, ...]:
    return facts.measured.rates if facts.measured else ()


def all_reduce(facts: Facts) -> Iterator[Finding]:
    """Latency and bandwidth of collectives against the tables the planner uses."""
    measured = facts.measured
    if measured is None or not measured.all_reduces:
        return
    told = [(each, each.modelled_microseconds) for each in measured.all_reduces if each.modelled_microseconds]
    slow = [(each, model) for each, model in told if each.microseconds > _MODEL_FACTOR * model]
    widest = max(measured.all_reduces, key=lambda each: each.bus_gbs)
    if slow:
        worst, model = max(slow, key=lambda pair: pair[0].microseconds / pair[1])
        yield Finding(
            "warning",
            "all_reduce",
            "All-reduces are slower than the cost model's",
            f"{len(slow)} of {len(told)} sizes; at {_size(worst)} {worst.microseconds:.0f} us, modelled {model:.0f} "
            f"us, over "
            f"{worst.ranks} ranks ({measured.backend})",
            "Tensor parallelism pays this twice a layer: the planner promises more than this machine does.",
            "See topology, peer access and NCCL's variables; phalanx doctor --measure --save-calibration FILE makes "
            "the "
            "planner use what was measured.",
        )
    elif told:
        yield Finding(
            "ok",
            "all_reduce",
            "All-reduces",
            f"as modelled or better; {widest.bus_gbs:.0f} GB/s bus bandwidth at {_size(widest)}",
        )
    else:
        yield Finding(
            "note",
            "all_reduce",
            "All-reduces",
            f"{measured.backend}, {widest.ranks} ranks: {min(each.microseconds for each in measured.all_reduces):.0f} "
            f"us at "
            f"least, up to {widest.bus_gbs:.1f} GB/s",
            "The cost model has no numbers for this link to compare with.",
        )


def _size(each: AllReduce) -> str:
    return f"{each.size / 2**20:.0f} MiB" if each.size >= 2**20 else f"{each.size / 2**10:.0f} KiB"
