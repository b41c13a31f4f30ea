"""Tables of `--query-gpu` and `--query-compute-apps`, and the list of `-q`."""

from __future__ import annotations

import pytest

from phalanx.doctor.facts import Fabric, GpuProcess, RemappedRows, RetiredPages
from phalanx.doctor.gather.smi import ParseError, parse_processes, parse_query, parse_report, query
from phalanx.doctor.gather.smi.read import gpu_of
from tests.doctor.gather import outputs


def test_columns_go_by_position_and_missing_is_none() -> None:
    first, second = parse_query(outputs.QUERY, outputs.QUERY_FIELDS)
    assert first == {
        "index": "0",
        "name": "NVIDIA H100 80GB HBM3",
        "memory.total": "81559",
        "clocks_throttle_reasons.active": "0x0000000000000004",
        "power.draw": "71.20",
        "mig.mode.current": "Disabled",
    }
    assert [second[field] for field in ("memory.total", "power.draw", "mig.mode.current")] == [None, None, None]


def test_a_gpu_from_its_row() -> None:
    h100, gb10 = (gpu_of(row) for row in parse_query(outputs.QUERY, outputs.QUERY_FIELDS))
    assert (h100.memory_total_mib, h100.throttle, h100.power_w, h100.mig) == (81559, ("power-cap",), 71.2, "off")
    assert not h100.unified
    assert (gb10.memory_total_mib, gb10.throttle, gb10.power_w, gb10.mig) == (None, (), None, None)
    assert gb10.unified


def test_what_a_driver_says_of_unified_memory_is_never_taken() -> None:
    wrong = outputs.QUERY.replace("GB10, [N/A]", "GB10, 4096 MiB")
    assert gpu_of(parse_query(wrong, outputs.QUERY_FIELDS)[1]).memory_total_mib is None


def test_a_column_of_another_field_is_not_taken() -> None:
    shifted = outputs.QUERY.replace("memory.total [MiB], clocks_event_reasons.active", "temperature.gpu, pstate")
    gpu = gpu_of(parse_query(shifted, outputs.QUERY_FIELDS)[0])
    assert (gpu.memory_total_mib, gpu.throttle, gpu.power_w) == (None, None, 71.2)


def test_a_cell_in_another_unit_is_not_taken() -> None:
    gpu = gpu_of(parse_query(outputs.QUERY.replace("81559 MiB", "81 GiB"), outputs.QUERY_FIELDS)[0])
    assert gpu.memory_total_mib is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its header names 1 columns, and 6 were asked for"),
        ("No devices were found\n", "its header names 1 columns"),
        (outputs.QUERY.replace(", Disabled", ""), "has 5 cells for 6 columns"),
        ("a, b, c, d, e, f\n0, 1, 2, 3, 4, 5\n", "names no field that was asked for"),
    ],
)
def test_broken_tables_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        parse_query(text, outputs.QUERY_FIELDS)


def test_a_gpu_needs_an_index_and_a_name() -> None:
    for text in (outputs.QUERY.replace("index,", "idx,"), outputs.QUERY.replace("0, NVIDIA H100", "x, NVIDIA H100")):
        with pytest.raises(ParseError, match="no index or no name"):
            gpu_of(parse_query(text, outputs.QUERY_FIELDS)[0])


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", ()),
        ("0x0000000000000001", ()),
        ("0x00000000000000E8", ("hw-slowdown", "sw-thermal", "hw-thermal", "power-brake")),
        ("Active", None),
        ("0x", None),
        ("", None),
        (None, None),
    ],
)
def test_throttle_reasons_are_bits(mask: str | None, reasons: tuple[str, ...] | None) -> None:
    assert query.throttles(mask) == reasons


def test_the_field_a_driver_does_not_know_is_named() -> None:
    assert query.invalid_field('Field "mig.mode.current" is not a valid field to query.') == "mig.mode.current"
    assert query.invalid_field("NVIDIA-SMI has failed") is None


def test_processes_without_their_arguments() -> None:
    assert parse_processes(outputs.PROCESSES) == {
        outputs.UUIDS[0]: (GpuProcess(4242, "/usr/bin/python3", 71234), GpuProcess(4243, "unknown", None)),
        outputs.UUIDS[1]: (GpuProcess(9, "VLLM::Worker_TP1", 512),),
    }
    with pytest.raises(ParseError, match="no GPU or no number"):
        parse_processes(outputs.PROCESSES.replace(", 4242,", ", ,"))


def test_a_report_of_fabric_and_rows() -> None:
    report = parse_report(outputs.REPORT)
    assert (report.driver, report.cuda) == ("580.95.05", "13.0")
    first, second = report.gpus
    assert first.bus_id == "00000000:4F:00.0"
    assert first.fabric == Fabric("completed", "Success", "limited")
    assert first.remapped == RemappedRows(1, 2, pending=True, failed=False)
    assert first.retired is None
    assert (second.fabric, second.remapped) == (Fabric("in-progress"), None)


def test_pages_that_older_cards_retired() -> None:
    told = outputs.REPORT.replace("Single Bit ECC                    : N/A", "Single Bit ECC : 3")
    told = told.replace("Double Bit ECC                    : N/A", "Double Bit ECC : 1")
    assert parse_report(told).gpus[0].retired is None, "whether some are pending is not told"
    told = told.replace("Pending Page Blacklist            : N/A", "Pending Page Blacklist : Yes")
    assert parse_report(told).gpus[0].retired == RetiredPages(3, 1, pending=True)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("==============NVSMI LOG==============", "", "does not begin with NVSMI LOG"),
        ("Attached GPUs                             : 2", "Attached GPUs : 8", "8 attached GPUs and lists 2"),
        ("GPU 00000000:52:00.0", "GPU 0000000", "2 attached GPUs and lists 1"),
        ("00000000:52:00.0", "00000000:4F:00.0", "two GPUs have the same bus address"),
        (
            "        Remapping Failure Occurred        : No\n",
            "        Remapping Failure Occurred        : No\n        Remapping Failure Occurred        : Yes\n",
            "both 'No' and 'Yes'",
        ),
    ],
)
def test_a_damaged_report_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        parse_report(outputs.REPORT.replace(old, new, 1))
