"""Every recorded output parses to what is stated here, or is refused for the reason stated here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.doctor.gather.fabric_manager import parse_log
from phalanx.doctor.gather.smi import (
    ParseError,
    parse_links,
    parse_listing,
    parse_peers,
    parse_query,
    parse_report,
    parse_topology,
)
from phalanx.doctor.gather.smi.query import throttles, whole
from tests.doctor.gather.samples import FOLDER, sample, sample_names

needs_samples = pytest.mark.skipif(not FOLDER.exists(), reason="the recorded outputs are not there")


def paths(text: str) -> dict[str, int]:
    """How many pairs have each path: NV12, or a kind."""
    topology = parse_topology(text)
    return Counter(f"NV{path.links}" if path.links else path.kind for path in topology.paths)


def nodes(text: str) -> list[int | None]:
    topology = parse_topology(text)
    return [topology.numa_nodes.get(gpu) for gpu in range(topology.gpus)]


def topology(text: str) -> tuple[dict[str, int], list[int | None]]:
    return paths(text), nodes(text)


def links(text: str) -> dict[int, str]:
    """Active of listed links, and their speeds."""
    speeds = {gpu: {link.gbs for link in found if link.active} for gpu, found in parse_links(text).items()}
    return {
        gpu: f"{sum(link.active for link in found)} of {len(found)} at {sorted(map(str, speeds[gpu]))}"
        for gpu, found in parse_links(text).items()
    }


def peers(text: str) -> dict[str, int]:
    return Counter(parse_peers(text).values())


def slices(text: str) -> list[tuple[str, ...]]:
    return [gpu.slices for gpu in parse_listing(text)]


def retired(text: str) -> tuple[str | None, list[tuple[int, int, bool]]]:
    report = parse_report(text)
    pages = [gpu.retired for gpu in report.gpus]
    return report.driver, [(page.single_bit, page.double_bit, page.pending) for page in pages if page]


def table(*fields: str) -> Callable[[str], Any]:
    return lambda text: [list(row.values()) for row in parse_query(text, fields)]


def throttled(text: str) -> list[object]:
    fields = ("active", "gpu_idle", "hw_thermal_slowdown", "sw_thermal_slowdown", "sw_power_cap")
    rows = parse_query(text, ("index", "name", *(f"clocks_throttle_reasons.{field}" for field in fields)))
    return [throttles(row["clocks_throttle_reasons.active"]) for row in rows]


def fabric_log(text: str) -> tuple[str | None, str | None]:
    end = parse_log(text)
    return end.version, end.problem


RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
PARSED: dict[str, tuple[Callable[[str], Any], Any]] = {
    "bad_nvlink_status.txt": (links, {6: "0 of 0 at []"}),
    "bad_nvsmi8_output.txt": (
        retired,
        (
            "535.86.10",
            [
                (60, 5, False),
                (2, 61, True),
                (0, 0, False),
                (6, 0, True),
                (0, 0, False),
                (20, 45, True),
                (0, 0, False),
                (8, 56, True),
            ],
        ),
    ),
    "orig_nvsmi8_output.txt": (retired, ("535.86.10", [(0, 0, False)] * 8)),
    "fabricmanager.log": (
        fabric_log,
        (
            None,
            "Feb 27 2025 15:10:02: detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id "
            "00000000:86:00.0 physical id 3 port 61",
        ),
    ),
    "nvlink_s_2x_h100_pcie.txt": (links, dict.fromkeys(range(2), "12 of 18 at ['26.562']")),
    "nvlink_s_4x_rtx3090_nobridge.txt": (links, dict.fromkeys(range(4), "0 of 0 at []")),
    "nvlink_s_8x_a100.txt": (links, dict.fromkeys(range(8), "12 of 12 at ['25.0']")),
    "nvlink_s_a10.txt": (links, {}),
    "nvsmi_L_mig_a100.txt": (slices, [("1g.10gb",) * 7]),
    "query_ecc_power_rtxpro6000.csv": (
        table(
            "index",
            "name",
            "temperature.gpu",
            "power.draw",
            "power.limit",
            "ecc.errors.corrected.volatile.total",
            "ecc.errors.uncorrected.volatile.total",
        ),
        [["0", RTX_PRO, "25", "30.39", "600.00", "0", "0"], ["1", RTX_PRO, "25", "28.54", "600.00", "0", "0"]],
    ),
    "query_gb10.csv": (
        table("memory.total", "memory.used", "memory.free", "utilization.gpu", "power.draw", "temperature.gpu"),
        [[None, None, None, "0", "11.17", "35"]],
    ),
    "query_throttle_rtxpro6000.csv": (throttled, [("power-cap",), ("power-cap",)]),
    "topo_2x_h100_pcie_bridged_spaces.txt": (topology, ({"NV12": 1}, [1, 1])),
    "topo_4gpu_2x4090_a6000_5090.txt": (topology, ({"phb": 6}, [0, 0, 0, 0])),
    "topo_4x_a100_pcie_bridged.txt": (topology, ({"NV12": 2, "sys": 4}, [0, 0, 1, 1])),
    "topo_4x_a100_pcie_oldfmt_mlx_names.txt": (topology, ({"node": 2, "sys": 4}, [0, 0, 1, 1])),
    "topo_4x_h100_sxm_nv6.txt": (topology, ({"NV6": 6}, [3, 1, 7, 5])),
    "topo_4x_l40_numa_nic.txt": (topology, ({"node": 2, "sys": 4}, [0, 0, 1, 1])),
    "topo_4x_l40s_pcie.txt": (topology, ({"phb": 2, "sys": 4}, [0, 0, 1, 1])),
    "topo_4x_rtxpro6000.txt": (topology, ({"phb": 6}, [0, 0, 0, 0])),
    "topo_5gpu_mixed_4090.txt": (topology, ({"sys": 4, "phb": 2, "node": 4}, [1, 0, 0, 0, 0])),
    "topo_8x_nv18_full_slurm_cgroup.txt": (topology, ({"NV18": 28}, [0, 0, 0, 0, 1, 1, 1, 1])),
    "topo_8x_nv18_hgx.partial.txt": (topology, ({"NV18": 28}, [0, 0, 0, 0, 1, 1, 1, 1])),
    "topo_8x_rtx4090_sys.txt": (topology, ({"sys": 28}, [0, 0, 0, 0, 1, 1, 1, 1])),
    "topo_dgx_spark.txt": (topology, ({}, [0])),
    "topo_p2p_2x5090_gns.txt": (peers, {"gpu": 1}),
    "topo_p2p_4x_rtxpro6000.txt": (peers, {"ok": 6}),
}
REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    # Both begin with a remark that no nvidia-smi prints, and one holds two tables.
    "query_memory_names.csv": (table("name", "memory.total"), "its header names 5 columns, and 2 were asked for"),
    "query_pcie_mig_samples.csv": (
        table("index", "name", "mig.mode.current", "mig.mode.pending"),
        "its header names 3 columns, and 4 were asked for",
    ),
}


@needs_samples
def test_every_sample_is_in_one_of_the_tables() -> None:
    assert sample_names() == sorted([*PARSED, *REFUSED])


@needs_samples
@pytest.mark.parametrize("name", PARSED)
def test_sample_parses(name: str) -> None:
    parse, expected = PARSED[name]
    assert parse(sample(name)) == expected


@needs_samples
@pytest.mark.parametrize("name", REFUSED)
def test_sample_is_refused(name: str) -> None:
    parse, reason = REFUSED[name]
    with pytest.raises(ParseError, match=reason):
        parse(sample(name))


@needs_samples
def test_no_sample_passes_for_the_output_of_another_command() -> None:
    """Only the empty output, which says that no GPU has NVLink, is a whole answer to several."""
    parsers = {links: "nvlink", slices: "nvsmi_L", peers: "topo_p2p", paths: "topo_", retired: "nvsmi8"}
    for name in sample_names():
        for parse, own in parsers.items():
            if own in name or not sample(name) or (parse is paths and name.startswith("topo_p2p")):
                continue
            with pytest.raises(ParseError):
                parse(sample(name))


@needs_samples
def test_the_tables_below_the_remarks() -> None:
    names, memory = "name", "memory.total"
    rows = sample("query_memory_names.csv").splitlines()[1:]
    parsed = parse_query("\n".join([f"{names}, {memory} [MiB]", *rows]), (names, memory))
    found = {row[names]: whole(row[memory]) for row in parsed}
    assert (found["NVIDIA H200"], found["NVIDIA B300 SXM6 AC"], found["NVIDIA GB10"]) == (143771, 275040, None)
    assert len(found) == 15
    lines = sample("query_pcie_mig_samples.csv").splitlines()
    widths = ("index", "name", "driver_version", "pcie.link.gen.current", "pcie.link.width.current")
    [card] = parse_query("\n".join(lines[1:3]), (*widths, "pcie.link.gen.max", "pcie.link.width.max"))
    assert (card["pcie.link.width.current"], card["pcie.link.width.max"]) == ("8", "8")
    [laptop] = parse_query("\n".join(lines[4:6]), ("index", "name", "mig.mode.current", "mig.mode.pending"))
    assert laptop["mig.mode.current"] is None
