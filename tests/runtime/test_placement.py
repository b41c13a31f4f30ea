"""Which node runs which rank: the driver's first, a node's ranks side by side, and what is refused with the numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.runtime.placement import RayNode, Wanted, bundle_of_each_rank, bundles, check_room, driver_first


def node(number: int, gpus: int = 1, cpus: int = 20, free_gpus: int | None = None) -> RayNode:
    free = gpus if free_gpus is None else free_gpus
    return RayNode(f"id{number}", f"10.0.0.{number}", f"spark-{number}", gpus, cpus, free, cpus)


SPARKS = [node(10), node(2), node(1), node(9)]


def test_four_sparks_are_packed_by_ray_with_rank_0_held_where_the_server_is() -> None:
    wanted = Wanted(4, on_gpus=True, per_node=None)
    asked = bundles(wanted, SPARKS, driver="id9")
    assert asked == [{"GPU": 1.0, "node:10.0.0.9": 0.001}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]


def test_nodes_follow_the_driver_in_the_order_of_their_addresses() -> None:
    assert [each.id for each in driver_first(SPARKS, "id9")] == ["id9", "id1", "id2", "id10"]


def test_on_cpus_each_node_gets_one_rank_or_as_many_as_asked_for() -> None:
    one_each = bundles(Wanted(3, on_gpus=False, per_node=None), SPARKS, driver="id1")
    assert [_where(bundle) for bundle in one_each] == ["10.0.0.1", "10.0.0.2", "10.0.0.9"]
    assert {bundle["CPU"] for bundle in one_each} == {1.0}
    two_each = bundles(Wanted(3, on_gpus=False, per_node=2), SPARKS, driver="id2")
    assert [_where(bundle) for bundle in two_each] == ["10.0.0.2", "10.0.0.2", "10.0.0.1"]


def test_ranks_per_node_holds_on_gpus_too() -> None:
    nodes = [node(1, gpus=8), node(2, gpus=8)]
    asked = bundles(Wanted(4, on_gpus=True, per_node=2), nodes, driver="id2")
    assert [_where(bundle) for bundle in asked] == ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.1"]


def _where(bundle: dict[str, float]) -> str:
    (pinned,) = [name for name in bundle if name.startswith("node:")]
    return pinned.removeprefix("node:")


def test_scattered_bundles_are_sorted_so_that_a_node_has_neighbouring_ranks() -> None:
    """PACK promises no order: here it dealt the bundles of two nodes like cards."""
    nodes = [node(1, gpus=4), node(2, gpus=4)]
    scattered = {0: "id2", 1: "id1", 2: "id2", 3: "id1", 4: "id2"}
    assert bundle_of_each_rank(scattered, nodes, driver="id2") == [0, 2, 4, 1, 3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=16), st.data())
def test_in_any_placement_rank_0_is_on_the_drivers_node_and_no_node_appears_twice(
    dealt: list[int], data: st.DataObject
) -> None:
    nodes = [node(number) for number in range(1, 6)]
    placed = {bundle: f"id{number}" for bundle, number in enumerate(dealt)}
    driver = data.draw(st.sampled_from(sorted(set(placed.values()))))
    ranks = bundle_of_each_rank(placed, nodes, driver)
    assert sorted(ranks) == list(placed)
    along = [placed[bundle] for bundle in ranks]
    assert along[0] == driver
    changes = [here for before, here in pairwise(along) if before != here]
    assert len(changes) == len(set(along)) - 1


def test_too_few_gpus_are_told_node_by_node() -> None:
    nodes = [node(1, gpus=1), node(2, gpus=1, free_gpus=0)]
    with pytest.raises(ConfigError) as caught:
        check_room(Wanted(4, on_gpus=True, per_node=None), nodes, "id1")
    assert caught.value.code == "cluster_too_small"
    assert "4 ranks need 4 GPUs" in caught.value.found
    assert "spark-1 (10.0.0.1): 1 of 1 GPUs and 20 of 20 CPUs free" in caught.value.found
    assert "spark-2 (10.0.0.2): 0 of 1 GPUs" in caught.value.found


def test_ranks_that_no_node_can_hold_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 GPUs, 2 on each node"):
        check_room(Wanted(4, on_gpus=True, per_node=2), SPARKS, "id1")


def test_a_server_on_a_node_without_a_gpu_is_refused() -> None:
    nodes = [node(1, gpus=0), node(2, gpus=4)]
    with pytest.raises(ConfigError) as caught:
        check_room(Wanted(2, on_gpus=True, per_node=None), nodes, "id1")
    assert caught.value.code == "no_room_here"


def test_two_nodes_at_one_address_are_refused() -> None:
    twin = RayNode("other", "10.0.0.1", "spark-1", 1, 20, 1, 20)
    with pytest.raises(ConfigError) as caught:
        check_room(Wanted(2, on_gpus=True, per_node=None), [node(1), twin], "id1")
    assert caught.value.code == "same_address"


def test_enough_room_passes() -> None:
    check_room(Wanted(4, on_gpus=True, per_node=None), SPARKS, "id1")
    check_room(Wanted(4, on_gpus=False, per_node=None), SPARKS, "id1")
