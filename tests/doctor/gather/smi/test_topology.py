"""`topo -m` and `topo -p2p`: every form that drivers print is read; what is damaged is refused, never guessed."""

from __future__ import annotations

import pytest

from phalanx.doctor.facts import GpuPath
from phalanx.doctor.gather.smi import ParseError, parse_peers, parse_topology
from tests.doctor.gather import outputs


def test_islands_of_bridged_cards() -> None:
    topology = parse_topology(outputs.TOPOLOGY_TWO_ISLANDS)
    assert topology.gpus == 4
    assert topology.paths == (
        GpuPath(0, 1, "nvlink", 12),
        GpuPath(0, 2, "sys"),
        GpuPath(0, 3, "sys"),
        GpuPath(1, 2, "sys"),
        GpuPath(1, 3, "sys"),
        GpuPath(2, 3, "phb"),
    )
    assert topology.numa_nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_columns_of_spaces_and_names_of_old_drivers() -> None:
    spaces = parse_topology(outputs.TOPOLOGY_SPACES)
    assert (spaces.paths, spaces.numa_nodes) == ((GpuPath(0, 1, "node"),), {0: 1, 1: 0})
    old = parse_topology(outputs.TOPOLOGY_OLD_NAMES)
    assert (old.paths, old.numa_nodes) == ((GpuPath(0, 1, "pix"),), {0: 0, 1: 1})


def test_an_empty_cpu_affinity_does_not_shift_the_numa_node() -> None:
    assert parse_topology(outputs.TOPOLOGY_CPUSET).numa_nodes == {0: 1, 1: 0}
    spaces = outputs.TOPOLOGY_SPACES.replace("8-15,24-31", " " * 10)
    assert parse_topology(spaces).numa_nodes == {1: 0}, "without tabs the shifted row cannot be told from a whole one"


def test_a_line_about_too_many_nics_may_come_first() -> None:
    before = "76 NICs found in the topology, only displaying 56 in the matrix.\n"
    assert parse_topology(before + outputs.TOPOLOGY_CPUSET) == parse_topology(outputs.TOPOLOGY_CPUSET)


def test_colours_are_taken_out_and_other_escapes_are_refused() -> None:
    header, rest = outputs.TOPOLOGY_CPUSET.split("\n", 1)
    underlined = f"\x1b[4m{header}\x1b[0m\n{rest}"
    assert parse_topology(underlined) == parse_topology(outputs.TOPOLOGY_CPUSET)
    with pytest.raises(ParseError, match="control character"):
        parse_topology(f"\x1b[2J{outputs.TOPOLOGY_CPUSET}")


def test_rows_of_nics_may_be_cut_off_but_not_those_of_gpus() -> None:
    lines = outputs.TOPOLOGY_TWO_ISLANDS.splitlines()
    assert parse_topology("\n".join(lines[:5])) == parse_topology(outputs.TOPOLOGY_TWO_ISLANDS)
    with pytest.raises(ParseError, match="there is no row GPU3"):
        parse_topology("\n".join(lines[:4]))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\tGPU0\tGPU1", "\tGPU0GPU1", "GPU0GPU1, which is no device: were tabs lost"),
        ("NIC0\tCPU", "NIC0NIC1\tCPU", "NIC0NIC1, which is no device"),
        ("PIX\t0-31", "PIX0-31", "row GPU0 says PIX0-31 below NIC0"),
        ("GPU0\t X \tNV12\tSYS", "GPU0\t X \tNV12SYS", "row GPU0 says NV12SYS below GPU1"),
        ("GPU0\t X \tNV12", "GPU0\t X \tNV4", "GPU0 reaches GPU1 by NV4, but GPU1 reaches GPU0 by NV12"),
        ("GPU0\t X \tNV12", "GPU0\tNV12\t X ", "row GPU0 says NV12 below GPU0"),
        ("GPU0\t X \tNV12", "GPU0\t X \tNV0", "row GPU0 says NV0 below GPU1"),
        ("\tGPU0\tGPU1\tGPU2\tGPU3", "\tGPU0\tGPU1\tGPU2", "there is a row GPU3, but no such column"),
        ("GPU1\tNV12", "GPU0\tNV12", "there are two rows GPU0|row GPU0 says"),
        ("\tGPU0\tGPU1\tGPU2", "\tGPU0\tGPU2\tGPU1", "its columns are not GPU0, GPU1"),
        ("\tGPU0\tGPU1\tGPU2", "\tGPUX\tGPU1\tGPU2", "no line names the columns"),
        ("NIC0\tPIX\tPXB\tSYS\tSYS\t X ", "NIC0\tPIX\tPXB", "row NIC0 has 2 cells for 5 devices"),
    ],
)
def test_damage_is_refused(old: str, new: str, reason: str) -> None:
    damaged = outputs.TOPOLOGY_TWO_ISLANDS.replace(old, new, 1)
    assert damaged != outputs.TOPOLOGY_TWO_ISLANDS
    with pytest.raises(ParseError, match=reason):
        parse_topology(damaged)


@pytest.mark.parametrize("text", ["", "\n\n", "No devices were found\n", "NVIDIA-SMI has failed\n"])
def test_no_matrix_is_refused(text: str) -> None:
    for parse in (parse_topology, parse_peers):
        with pytest.raises(ParseError, match="no line names the columns"):
            parse(text)


def test_peer_access_by_pair() -> None:
    assert parse_peers(outputs.PEERS_MIXED) == {(0, 1): "ok", (0, 2): "chipset", (1, 2): "unsupported"}


def test_of_two_directions_the_worse_counts() -> None:
    one_way = outputs.PEERS_MIXED.replace(" GPU1\tOK", " GPU1\tDR")
    assert parse_peers(one_way)[0, 1] == "disabled"
    other_way = outputs.PEERS_MIXED.replace(" GPU0\tX\tOK", " GPU0\tX\tU")
    assert parse_peers(other_way)[0, 1] == "unknown"


def test_a_path_is_no_peer_access() -> None:
    with pytest.raises(ParseError, match="row GPU0 says NV12"):
        parse_peers(outputs.TOPOLOGY_TWO_ISLANDS)
