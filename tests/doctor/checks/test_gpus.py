"""Cards and their memory: what is said, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.doctor.checks import cpu, gpus, memory
from phalanx.doctor.facts import Facts, GpuFacts, GpuProcess, RemappedRows, RetiredPages, Serving, Software, System
from phalanx.doctor.finding import Finding
from tests.doctor.build_machines import GIB, change, hgx, spark

BARE = GpuFacts(index=0, name="NVIDIA H100 80GB HBM3")


def said(found: Any) -> list[tuple[str, str]]:
    """Level and code of whatever a check gives back."""
    findings = [found] if isinstance(found, Finding) else list(found or ())
    return [(finding.level, finding.code) for finding in findings]


def machine(*found: GpuFacts, **told: Any) -> Facts:
    return Facts("2026-11-15T09:00:00+00:00", System("box"), Software("3.12", "0.1"), found, **told)


def with_first(facts: Facts, **told: Any) -> Facts:
    """The same machine, with one GPU changed."""
    return change(facts, gpus=(change(facts.gpus[0], **told), *facts.gpus[1:]))


@pytest.mark.parametrize(
    "check",
    [
        gpus.mig,
        gpus.xids,
        gpus.pcie_width,
        gpus.persistence,
        gpus.lost_gpus,
        memory.ecc,
        memory.ecc_errors,
        memory.remapped_rows,
        memory.gpu_memory,
        memory.unified_memory,
    ],
)
def test_what_a_card_does_not_tell_is_not_judged(check: Any) -> None:
    assert said(check(machine(BARE))) == []
    assert said(check(machine())) == []


def test_cards_that_differ_are_named_as_the_planner_wants_them() -> None:
    mixed = machine(BARE, change(BARE, index=1, name="NVIDIA H200"))
    (finding,) = gpus.names(mixed)
    assert (finding.level, finding.code) == ("warning", "gpu_names")
    assert "1xH100-SXM+1xH200-SXM" in finding.fix
    assert said(gpus.names(hgx())) == [("ok", "gpu_names")]


def test_a_card_nobody_described_is_a_note() -> None:
    assert said(gpus.names(machine(change(BARE, name="NVIDIA Z9000")))) == [
        ("ok", "gpu_names"),
        ("note", "gpu_unknown"),
    ]


def test_mig_stops_tensor_parallelism_and_only_lessens_a_single_card() -> None:
    assert said(gpus.mig(with_first(hgx(), mig="on"))) == [("error", "mig")]
    assert said(gpus.mig(machine(change(BARE, mig="on")))) == [("warning", "mig")]
    assert said(gpus.mig(hgx())) == [("ok", "mig")]
    assert said(gpus.mig(with_first(hgx(), mig=None))) == []


def test_a_lost_gpu_is_an_error() -> None:
    assert said(gpus.lost_gpus(change(hgx(), lost_gpus=(7,)))) == [("error", "lost_gpus")]


def test_ecc_off_is_a_fault_of_server_cards_only() -> None:
    assert said(memory.ecc(with_first(hgx(), ecc=False))) == [("warning", "ecc")]
    geforce = change(BARE, name="NVIDIA GeForce RTX 4090", ecc=False)
    assert said(memory.ecc(machine(geforce))) == []


def test_errors_that_ecc_could_not_mend() -> None:
    assert said(memory.ecc_errors(with_first(hgx(), uncorrected_errors=2))) == [("error", "ecc_errors")]
    assert said(memory.ecc_errors(hgx())) == [("ok", "ecc_errors")]
    assert said(memory.ecc_errors(with_first(hgx(), uncorrected_errors=None))) == []


def test_rows_that_wait_and_rows_that_could_not_be_replaced() -> None:
    waiting = RemappedRows(0, 1, pending=True, failed=False)
    broken = RemappedRows(0, 8, pending=False, failed=True)
    assert said(memory.remapped_rows(with_first(hgx(), remapped=waiting))) == [("warning", "remapped_rows")]
    assert said(memory.remapped_rows(with_first(hgx(), remapped=broken))) == [("error", "remapped_rows")]
    old = change(BARE, retired=RetiredPages(1, 0, pending=True))
    assert said(memory.remapped_rows(machine(old))) == [("warning", "remapped_rows")]


def test_xids_of_hardware_are_errors_and_those_of_programs_are_not() -> None:
    def seen(*xids: int) -> Facts:
        return change(hgx(), system=change(hgx().system, xids=xids))

    assert said(gpus.xids(seen(79))) == [("error", "xid")]
    assert said(gpus.xids(seen(31, 43))) == [("note", "xid")]
    assert said(gpus.xids(seen(31, 48))) == [("error", "xid")]
    assert said(gpus.xids(seen())) == [("ok", "xid")]


def test_lanes_are_counted_but_not_on_a_gb10() -> None:
    assert said(gpus.pcie_width(with_first(hgx(), pcie_width=8))) == [("warning", "pcie_width")]
    assert said(gpus.pcie_width(hgx())) == [("ok", "pcie_width")]
    assert said(gpus.pcie_width(spark())) == []


def test_persistence() -> None:
    assert said(gpus.persistence(with_first(hgx(), persistence=False))) == [("note", "persistence")]
    assert said(gpus.persistence(with_first(hgx(), persistence=None))) == []


def test_memory_that_others_hold_is_named() -> None:
    held = with_first(hgx(), memory_used_mib=40_000, processes=(GpuProcess(1, "python3", 40_000),))
    finding = memory.gpu_memory(held)
    assert finding is not None
    assert finding.level == "warning"
    assert "GPU 0: 39.1 GiB; by python3" in finding.found
    unseen = memory.gpu_memory(with_first(hgx(), memory_used_mib=40_000))
    assert unseen is not None
    assert "not shown" in unseen.found
    serving = Serving("Llama-3.3-70B", 4, 1.0, 10.0)
    assert said(memory.gpu_memory(change(held, serving=serving))) == [("note", "gpu_memory")]
    assert said(memory.gpu_memory(hgx())) == [("ok", "gpu_memory")]


def test_unified_memory_that_the_page_cache_holds() -> None:
    full = change(spark(), system=change(spark().system, available_bytes=90 * GIB))
    finding = memory.unified_memory(full)
    assert finding is not None
    assert finding.level == "warning"
    assert "drop_caches" in finding.fix
    assert said(memory.unified_memory(spark())) == [("ok", "unified_memory")]
    assert said(memory.unified_memory(hgx())) == []


def laptop(**told: Any) -> Facts:
    system = System("laptop", cores=8, cpu="Some CPU", architecture="x86_64", available_bytes=12 * GIB, **told)
    absent = ("NVML cannot be asked: NVML Shared Library Not Found.", "nvidia-smi is not installed.")
    return Facts("2026-11-15T09:00:00+00:00", system, Software("3.12", "0.1"), unread=absent)


def test_a_laptop_is_told_what_it_can_serve() -> None:
    (finding,) = cpu.cpu_serving(laptop())
    assert finding.level == "note"
    assert "8 cores, 12.0 GiB" in finding.found
    assert "SmolLM2-135M, needs 1.5 GiB" in finding.why
    assert "Qwen3-0.6B" in finding.why or "the largest" in finding.why
    (unknown,) = cpu.cpu_serving(change(laptop(), system=System("laptop")))
    assert unknown.level == "note"
    assert said(cpu.cpu_serving(hgx())) == []


def test_a_gpu_that_should_be_there_is_not_taken_for_a_laptop() -> None:
    driven = change(laptop(), software=Software("3.12", "0.1", driver="580.95.05"))
    assert ("warning", "no_gpu") in said(cpu.cpu_serving(driven))
    broken = change(laptop(), unread=("NVML cannot be asked: Driver/library version mismatch.",))
    assert ("warning", "no_gpu") in said(cpu.cpu_serving(broken))


@pytest.mark.parametrize(
    ("instructions", "level", "words"),
    [
        (("avx2", "avx512f", "avx512_bf16", "amx_tile"), "ok", "AVX-512, AMX, bf16"),
        (("avx2", "avx512f"), "ok", "no bf16 instructions"),
        (("avx2",), "note", "AVX2"),
        (("sse4_2",), "note", "neither"),
    ],
)
def test_instructions_of_the_processor(instructions: tuple[str, ...], level: str, words: str) -> None:
    finding = cpu.cpu_instructions(laptop(instructions=instructions))
    assert finding is not None
    assert finding.level == level
    assert words in finding.found


def test_instructions_that_were_not_read_are_not_judged() -> None:
    assert cpu.cpu_instructions(laptop()) is None
    assert cpu.cpu_instructions(hgx()) is None
