"""Damaged output is refused or read as no better than it was: no crash, no false health."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.doctor.facts import GpuFacts, GpuPath
from phalanx.doctor.gather.fabric_manager import parse_log, parse_service, parse_version
from phalanx.doctor.gather.network import parse_addresses, parse_devinfo, parse_ibdev2netdev
from phalanx.doctor.gather.smi import (
    ParseError,
    parse_link_errors,
    parse_links,
    parse_listing,
    parse_peers,
    parse_processes,
    parse_query,
    parse_report,
    parse_topology,
)
from phalanx.doctor.gather.smi.read import FIELDS, gpu_of
from tests.doctor.gather import outputs
from tests.doctor.gather.samples import sample, sample_names


def drop_line(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    del lines[rng.randrange(len(lines))]
    return "\n".join(lines)


def repeat_line(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return "\n".join(lines)


def swap_lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines)


def cut_short(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def cut_line(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    i = rng.randrange(len(lines))
    lines[i] = cut_short(lines[i], rng)
    return "\n".join(lines)


def lose_a_tab(text: str, rng: random.Random) -> str:
    tabs = [i for i, character in enumerate(text) if character == "\t"]
    i = rng.choice(tabs) if tabs else len(text)
    return text[:i] + text[i + 1 :]


def lose_tabs_of_a_line(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    i = rng.randrange(len(lines))
    lines[i] = lines[i].replace("\t", "")
    return "\n".join(lines)


def swap_cells(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    i = rng.randrange(len(lines))
    mark = "\t" if "\t" in lines[i] else ", " if ", " in lines[i] else " "
    cells = lines[i].split(mark)
    a, b = rng.randrange(len(cells)), rng.randrange(len(cells))
    cells[a], cells[b] = cells[b], cells[a]
    lines[i] = mark.join(cells)
    return "\n".join(lines)


def damage_letters(text: str, rng: random.Random) -> str:
    found = list(text)
    for _ in range(min(len(found), rng.randrange(1, 4))):
        found[rng.randrange(len(found))] = chr(rng.choice([rng.randrange(256), rng.randrange(0x2FFF)]))
    return "".join(found)


LOSSES = [drop_line, cut_short, lose_a_tab, lose_tabs_of_a_line, cut_line]
MUTATIONS = [*LOSSES, repeat_line, swap_lines, swap_cells, damage_letters]


def chosen(names: str, own: list[str]) -> st.SearchStrategy[str]:
    """Samples whose names contain this, and outputs of our own."""
    return st.sampled_from([*own, *(sample(name) for name in sample_names() if names in name)])


def mutated(mutations: list[Callable[[str, random.Random], str]] = MUTATIONS) -> st.SearchStrategy[Any]:
    """A function that damages a text a few times."""
    steps = st.lists(st.sampled_from(mutations), min_size=1, max_size=3)

    def damage(steps: list[Callable[[str, random.Random], str]], seed: int) -> Callable[[str], str]:
        def apply(text: str) -> str:
            rng = random.Random(seed)
            for step in steps:
                text = step(text, rng)
            return text

        return apply

    return st.builds(damage, steps, st.integers(0, 2**32))


def read(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ParseError:
        return None


TOPOLOGIES = [
    outputs.TOPOLOGY_TWO_ISLANDS,
    outputs.TOPOLOGY_SPACES,
    outputs.TOPOLOGY_CPUSET,
    outputs.TOPOLOGY_OLD_NAMES,
]


def by_pair(paths: tuple[GpuPath, ...]) -> dict[tuple[int, int], GpuPath]:
    return {(path.a, path.b): path for path in paths}


@settings(deadline=None)
@given(chosen("topo_", TOPOLOGIES), mutated())
def test_a_damaged_topology_shows_no_path_that_was_not_there(text: str, damage: Callable[[str], str]) -> None:
    original, found = read(parse_topology, text), read(parse_topology, damage(text))
    if original is not None and found is not None:
        before = by_pair(original.paths)
        assert all(path == before[pair] for pair, path in by_pair(found.paths).items())


@settings(deadline=None)
@given(chosen("topo_", TOPOLOGIES), mutated([drop_line, repeat_line, lose_a_tab, lose_tabs_of_a_line]))
def test_a_damaged_topology_moves_no_gpu_to_another_node(text: str, damage: Callable[[str], str]) -> None:
    original, found = read(parse_topology, text), read(parse_topology, damage(text))
    if original is not None and found is not None:
        assert found.numa_nodes.items() <= original.numa_nodes.items()


@settings(deadline=None)
@given(chosen("topo_p2p", [outputs.PEERS_MIXED]), mutated())
def test_damaged_peer_access_allows_no_more(text: str, damage: Callable[[str], str]) -> None:
    original, found = parse_peers(text), read(parse_peers, damage(text))
    for pair, status in (found or {}).items():
        assert status != "ok" or original[pair] == "ok"


def active(text: str) -> int:
    return sum(link.active for links in (read(parse_links, text) or {}).values() for link in links)


@settings(deadline=None)
@given(chosen("nvlink", [outputs.LINKS_BRIDGED]), mutated())
def test_damaged_link_states_show_no_more_active_links(text: str, damage: Callable[[str], str]) -> None:
    assert active(damage(text)) <= active(text)


@settings(deadline=None)
@given(mutated(LOSSES))
def test_lost_link_states_show_no_more_active_links(damage: Callable[[str], str]) -> None:
    assert active(damage(outputs.LINKS_MIXED)) <= active(outputs.LINKS_MIXED)


@settings(deadline=None)
@given(st.sampled_from([outputs.LINK_ERRORS]), mutated([*LOSSES, repeat_line]))
def test_damaged_link_errors_are_not_fewer(text: str, damage: Callable[[str], str]) -> None:
    """A cut number is smaller: what matters is that a link with errors does not become one without."""
    for counts in (read(parse_link_errors, damage(text)) or {}).values():
        assert counts.get(0) != 0


@settings(deadline=None)
@given(chosen("nvsmi8", [outputs.REPORT]), st.one_of(mutated([drop_line, cut_short]), mutated([repeat_line])))
def test_a_damaged_report_makes_no_memory_whole(text: str, damage: Callable[[str], str]) -> None:
    """Rows or pages that wait for a reset still do, or nothing is said of them.

    A line that was both lost and repeated elsewhere has moved, which no reader can tell.
    """
    before = {gpu.bus_id: gpu for gpu in parse_report(text).gpus}
    report = read(parse_report, damage(text))
    for gpu in report.gpus if report else ():
        for now, then in ((gpu.remapped, before[gpu.bus_id].remapped), (gpu.retired, before[gpu.bus_id].retired)):
            assert now is None or now == then
        if gpu.fabric:
            assert gpu.fabric.state == before[gpu.bus_id].fabric.state
            assert gpu.fabric.health in (None, before[gpu.bus_id].fabric.health)


@settings(deadline=None)
@given(st.sampled_from([outputs.LISTING]), mutated())
def test_a_damaged_listing_is_read_or_refused(text: str, damage: Callable[[str], str]) -> None:
    read(parse_listing, damage(text))


@settings(deadline=None)
@given(mutated([m for m in MUTATIONS if m is not damage_letters]))
def test_damaged_cells_are_none_or_as_they_were(damage: Callable[[str], str]) -> None:
    def gpus(text: str) -> list[GpuFacts]:
        return [gpu_of(row) for row in parse_query(text, outputs.QUERY_FIELDS)]

    before = {gpu.index: gpu for gpu in gpus(outputs.QUERY)}
    for gpu in read(gpus, damage(outputs.QUERY)) or ():
        for name in ("memory_total_mib", "throttle", "power_w", "mig"):
            assert getattr(gpu, name) in (None, getattr(before[gpu.index], name))


ANY_TEXT: list[Callable[[str], Any]] = [
    parse_topology,
    parse_peers,
    parse_links,
    parse_link_errors,
    parse_listing,
    parse_processes,
    parse_report,
    parse_log,
    parse_service,
    parse_version,
    parse_addresses,
    parse_ibdev2netdev,
    parse_devinfo,
    lambda text: [gpu_of(row) for row in parse_query(text, FIELDS)],
]
ALL_OUTPUTS = [value for name, value in vars(outputs).items() if name.isupper() and isinstance(value, str)]


@settings(deadline=None)
@given(st.sampled_from(ANY_TEXT), chosen("", ALL_OUTPUTS), mutated())
def test_no_parser_crashes_on_damage(parse: Callable[[str], Any], text: str, damage: Callable[[str], str]) -> None:
    read(parse, damage(text))


@settings(deadline=None)
@given(st.sampled_from(ANY_TEXT), st.text())
def test_no_parser_crashes_on_any_text(parse: Callable[[str], Any], text: str) -> None:
    read(parse, text)


@pytest.mark.parametrize("parse", ANY_TEXT)
def test_bytes_that_are_no_text_do_not_crash(parse: Callable[[str], Any]) -> None:
    read(parse, bytes(range(256)).decode(errors="replace"))
