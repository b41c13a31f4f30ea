"""A machine without GPUs: what serving on its processor needs."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.doctor.checks.products import GIB, gib
from phalanx.doctor.facts import Facts
from phalanx.doctor.finding import Finding
from phalanx.models import catalog
from phalanx.spec.model import ModelSpec

DEFAULT_MODEL = "SmolLM2-135M"
_ABSENT = ("NVML Shared Library Not Found", "nvidia-smi is not installed")
_KV_SHARE = 0.25
"""Of the memory that is available, what the runtime gives to keys and values."""
_REST_BYTES = GIB
"""Python, torch and buffers."""


def gpu_troubles(facts: Facts) -> list[str]:
    """Why no GPU could be read, where the reason is another than that there is nothing of NVIDIA's."""
    asked = [said for said in facts.unread if "NVML" in said or "nvidia-smi" in said]
    return [said for said in asked if not is_absence(said)]


def is_absence(said: str) -> bool:
    return any(words in said for words in _ABSENT)


def cpu_bytes(spec: ModelSpec) -> int:
    """Memory to serve it on a processor: weights as float32, and the rest of the process."""
    return spec.weight_bytes("fp32") + _REST_BYTES


def fits_cpu(spec: ModelSpec, available: int) -> bool:
    return cpu_bytes(spec) <= (1 - _KV_SHARE) * available


def cpu_serving(facts: Facts) -> Iterator[Finding]:
    """No GPU is no fault: say what there is, and the largest models that would run."""
    if facts.gpus:
        return
    troubles = gpu_troubles(facts)
    if facts.software.driver is not None or troubles:
        driver = f"driver {facts.software.driver}" if facts.software.driver else "no driver is loaded"
        yield Finding(
            "warning",
            "no_gpu",
            "NVIDIA software is here, but no GPU answers",
            "; ".join([driver, *troubles]),
            "The card fell off the bus, the driver was updated without a reboot, or this container is given none.",
            "lspci | grep -i nvidia, dmesg | grep -i nvrm, nvidia-smi; then reboot. Docker: --gpus all.",
        )
    system = facts.system
    cores = f"{system.cores} cores" if system.cores else "a number of cores that could not be read"
    memory = f"{gib(system.available_bytes)} of memory available" if system.available_bytes else "memory not known"
    yield Finding(
        "note",
        "cpu_serving",
        "No NVIDIA GPU: models run on the processor",
        f"{system.cpu or 'processor not known'}, {cores}, {memory}",
        _what_fits(system.available_bytes),
        "phalanx serve starts the default model; phalanx plan MODEL --machine 4xH100-SXM plans for GPUs from here.",
    )


def _what_fits(available: int | None) -> str:
    default = catalog.entries()[DEFAULT_MODEL].spec
    needs = f"The default model, {DEFAULT_MODEL}, needs {gib(cpu_bytes(default))}"
    if not available:
        return f"{needs}: weights are float32 there, four bytes each."
    served = [(entry.name, entry.spec) for entry in catalog.entries().values() if entry.spec.refusal is None]
    fitting = [(name, spec) for name, spec in served if fits_cpu(spec, available)]
    if not fitting:
        return f"{needs}: more memory has to be freed first."
    name, spec = max(fitting, key=lambda each: each[1].parameters)
    return f"{needs}; the largest of the catalogue that fits is {name} with {gib(cpu_bytes(spec))} (float32, 4 B each)."


def cpu_instructions(facts: Facts) -> Finding | None:
    """Which vector instructions there are."""
    told = {name.lower() for name in facts.system.instructions}
    if facts.gpus or not told:
        return None
    if facts.system.architecture in ("aarch64", "arm64"):
        known: list[str] = [name for name in ("sve2", "sve", "i8mm", "bf16", "asimd") if name in told]
        return Finding("ok", "cpu_instructions", "Vector instructions", ", ".join(known) or "none that is known")
    wide = any(name.startswith("avx512") for name in told)
    matrix = any(name.startswith("amx") for name in told)
    half = bool({"avx512_bf16", "avx512bf16", "amx_bf16"} & told)
    if wide or matrix:
        has = [name for name, there in (("AVX-512", wide), ("AMX", matrix), ("bf16", half)) if there]
        without = "" if half else " There are no bf16 instructions: --dtype bf16 would be slower, not faster."
        return Finding(
            "ok", "cpu_instructions", "Vector instructions", f"{', '.join(has)}; Phalanx computes in float32.{without}"
        )
    return Finding(
        "note",
        "cpu_instructions",
        "No AVX-512",
        "AVX2" if "avx2" in told else "neither AVX-512 nor AVX2",
        "Prompts are processed at half the speed or less; decoding, which waits for memory, hardly suffers. Half "
        "precision "
        "is emulated: weights stay float32, at twice the memory of bf16.",
        "Keep prompts short, or use a newer processor or a GPU.",
    )
