"""Operating systems: which engines run there, and what each keeps of a card's memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.spec.machine import Machine

_GIB = 2**30


@dataclass(frozen=True)
class OperatingSystem:
    """`kept`: bytes of each card that the system itself takes. `instead`: what to do where no engine runs."""

    name: str
    title: str
    engines: tuple[str, ...]
    kept: int
    note: str
    source: str
    instead: str = ""

    def on(self, machine: Machine) -> Machine:
        """The machine with what this system leaves of its memory."""
        if not self.kept:
            return machine
        gpus = tuple(dataclasses.replace(gpu, memory_bytes=gpu.memory_bytes - self.kept) for gpu in machine.gpus)
        return dataclasses.replace(machine, gpus=gpus)


_ALL = ("phalanx", "vllm", "sglang", "trtllm")
SYSTEMS = {
    system.name: system
    for system in (
        OperatingSystem(
            "linux", "Linux", _ALL, 0, "All engines; a desktop takes up to 1 GiB of the card it draws on.", "-"
        ),
        OperatingSystem(
            "wsl2",
            "WSL2",
            _ALL,
            _GIB,
            "All engines; Windows keeps about 1 GiB of each card, peer access between cards is missing, and the Linux "
            "side has half of the machine's memory unless .wslconfig says otherwise.",
            "NVIDIA, CUDA on WSL user guide; Microsoft, WSL settings; from memory, 2026-11",
        ),
        OperatingSystem(
            "windows",
            "Windows",
            (),
            0,
            "None of these engines: vLLM and SGLang are for Linux, TensorRT-LLM gave up Windows with 0.18.",
            "docs.vllm.ai and docs.sglang.ai, Installation; TensorRT-LLM release notes 0.18; from memory, 2026-11",
            "Use WSL2 on the same machine (--os wsl2).",
        ),
        OperatingSystem(
            "macos",
            "macOS",
            (),
            0,
            "None of these engines on a GPU: there is no CUDA. Phalanx and vLLM serve small models on the processor; "
            "Metal's engines may use about three quarters of unified memory.",
            "docs.vllm.ai, Installation: Apple silicon; Apple, recommendedMaxWorkingSetSize; from memory, 2026-11",
            "Plan for Linux or WSL2, or serve on the processor.",
        ),
    )
}


def system(name: str) -> OperatingSystem:
    if name not in SYSTEMS:
        raise ConfigError("unknown_system", f"No system is called {name!r}.", f"Known: {', '.join(SYSTEMS)}.")
    return SYSTEMS[name]
