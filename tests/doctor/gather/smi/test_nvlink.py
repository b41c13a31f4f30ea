"""`nvlink --status`, `nvlink -e` and `-L`."""

from __future__ import annotations

import pytest

from phalanx.doctor.facts import NvLink
from phalanx.doctor.gather.smi import Listed, ParseError, parse_link_errors, parse_links, parse_listing
from tests.doctor.gather import outputs


def test_links_of_a_bridged_pair_some_inactive_by_design() -> None:
    links = parse_links(outputs.LINKS_BRIDGED)
    assert list(links) == [0, 1]
    assert [link.active for link in links[0]] == [True, True, True, True, False, False, True, True]
    assert links[1][0] == NvLink(0, active=True, gbs=26.562)
    assert links[1][4] == NvLink(4, active=False)


def test_cards_whose_links_are_all_inactive_or_that_have_none_list_none() -> None:
    links = parse_links(outputs.LINKS_MIXED)
    assert links == {0: (), 1: (NvLink(0, active=True, gbs=14.062), NvLink(1, active=False)), 2: ()}
    assert parse_links("") == {}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\t Link 3: 26.562 GB/s\n", "", "'Link 4: <inactive>' where link 3 is due"),
        ("\t Link 3: 26.562 GB/s\n", "\t Link 3: 26.562 GB/s\n" * 2, "where link 4 is due"),
        ("Link 3: 26.562 GB/s", "Link 3: 26.562 Gb", "says '26.562 Gb' of link 3"),
        ("Link 3: 26.562 GB/s", "Link 3: <inac", "says '<inac' of link 3"),
        ("Link 3: 26.562 GB/s", "Link 3:26.562", "where link 3 is due"),
        (f"GPU 1: NVIDIA H100 PCIe (UUID: {outputs.UUIDS[1]})\n", "", "where link 8 is due"),
        ("GPU 1:", "GPU 0:", "two GPUs have the same index"),
        (outputs.UUIDS[1], outputs.UUIDS[0], "two GPUs have the same UUID"),
        (f"GPU 0: NVIDIA H100 PCIe (UUID: {outputs.UUIDS[0]})\n", "", "instead of a GPU"),
    ],
)
def test_damaged_links_are_refused(old: str, new: str, reason: str) -> None:
    damaged = outputs.LINKS_BRIDGED.replace(old, new, 1)
    assert damaged != outputs.LINKS_BRIDGED
    with pytest.raises(ParseError, match=reason):
        parse_links(damaged)


def test_inactive_beside_a_speed_is_a_contradiction() -> None:
    words = "NVML: Unable to retrieve NVLink information as all links are inactive\n"
    with pytest.raises(ParseError, match="where link 0 is due"):
        parse_links(outputs.LINKS_MIXED.replace("         Link 0: 14", f"{words}         Link 0: 14"))


def test_a_link_without_speed_is_not_active() -> None:
    [link] = parse_links(f"GPU 0: NVIDIA A100 (UUID: {outputs.UUIDS[0]})\n  Link 0: 0 GB/s\n")[0]
    assert not link.active


def test_link_errors_are_summed_where_all_are_told() -> None:
    assert parse_link_errors(outputs.LINK_ERRORS) == {0: {0: 42}}
    without = outputs.LINK_ERRORS.replace("         Link 0: CRC Errors: 40\n", "")
    assert parse_link_errors(without) == {0: {}}


def test_link_errors_counted_twice_are_refused() -> None:
    with pytest.raises(ParseError, match="counts CRC Errors of link 0 twice"):
        parse_link_errors(outputs.LINK_ERRORS.replace("Recovery Errors: 2", "CRC Errors: 2"))


def test_a_listing_with_slices() -> None:
    assert parse_listing(outputs.LISTING) == [
        Listed(0, "NVIDIA A100-SXM4-80GB", outputs.UUIDS[0], ("3g.40gb", "3g.40gb")),
        Listed(1, "NVIDIA A100-SXM4-80GB", outputs.UUIDS[1]),
    ]


@pytest.mark.parametrize(
    ("old", "new"), [("Device  1:", "Device  2:"), ("  MIG 3g.40gb", "  MIX 3g.40gb"), ("(UUID: MIG-", "(MIG-")]
)
def test_a_damaged_listing_is_refused(old: str, new: str) -> None:
    with pytest.raises(ParseError, match="GPU 0 has the line"):
        parse_listing(outputs.LISTING.replace(old, new, 1))
