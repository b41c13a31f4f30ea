"""Which group ranks get, and which way a sum goes."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.fabric.choose import ProcessGroup, choose_group
from phalanx.fabric.group import FabricError, GlooGroup
from phalanx.fabric.host import HostGroup
from phalanx.fabric.nccl import NcclGroup, interface_of
from phalanx.fabric.peer import TWO_SHOT_BYTES, PeerGroup, one_shot_bytes
from phalanx.kernels import cpu
from phalanx.kernels.fp8 import Form
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.rank import Spot, local_spots, pick_device

pytest.importorskip("triton")

GPU = torch.device("cuda", 0)
NVLINK = {(first, second) for first in range(4) for second in range(4)}


def choose(gpus: list[int] | None, size: int = 4, links: set[tuple[int, int]] = NVLINK) -> ProcessGroup:
    return choose_group(1, size, GPU, gpus, linked=lambda first, second: (first, second) in links)


def test_cpu_ranks_talk_through_memory_on_one_machine_and_else_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert isinstance(choose_group(0, 2, here, None), GlooGroup)
    monkeypatch.setattr(cpu, "library", lambda: "compiled")
    assert isinstance(choose_group(0, 2, here, [0, 1]), HostGroup)
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert isinstance(choose_group(0, 2, here, [0, 1]), GlooGroup)


def test_gpus_that_reach_each_other_use_peer_memory_and_nccl_for_what_is_large() -> None:
    group = choose([0, 1, 2, 3])
    assert isinstance(group, PeerGroup)
    assert isinstance(group._large, NcclGroup)
    assert (group.rank, group.size, group.in_graphs) == (1, 4, True)


def test_one_missing_link_means_nccl_for_all() -> None:
    assert isinstance(choose([0, 1, 2, 3], links=NVLINK - {(2, 1)}), NcclGroup)


def test_several_machines_mean_nccl() -> None:
    assert isinstance(choose(None), NcclGroup)


def test_ranks_that_share_a_gpu_have_no_nccl() -> None:
    group = choose([0, 0, 0, 0], links=set())
    assert isinstance(group, PeerGroup)
    assert group._large is None


def test_more_ranks_than_there_are_flags_for() -> None:
    assert isinstance(choose(list(range(20)), size=20, links={(a, b) for a in range(20) for b in range(20)}), NcclGroup)
    with pytest.raises(ConfigError, match="17 ranks share 1 GPUs"):
        choose([0] * 17, size=17)


def test_ranks_on_two_shared_gpus_need_a_link() -> None:
    with pytest.raises(ConfigError, match="do not all reach"):
        choose([0, 1, 0, 1], links=set())


@pytest.mark.parametrize(("gpus", "wanted"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (8, [0, 1, 2])])
def test_ranks_share_the_gpus_there_are(gpus: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = EngineConfig(tp=3, device="cuda", share_gpus=True)
    spots = local_spots(config)
    assert [spot.gpu for spot in spots] == wanted
    assert {spot.ranks_on_gpu for spot in spots} == {-(-3 // min(gpus, 3))}
    assert pick_device(config, wanted[1]) == torch.device("cuda", wanted[1])


def test_ranks_do_not_share_a_gpu_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(tp=2, device="cuda")
    assert local_spots(config) == [Spot(0, 2), Spot(1, 2)]
    with pytest.raises(ConfigError, match="TP=2, but 1 GPUs are visible"):
        pick_device(config, 0)


def test_sharing_is_for_one_machine() -> None:
    with pytest.raises(ConfigError, match="share_gpus"):
        EngineConfig(tp=2, executor="ray", share_gpus=True)


def test_the_interface_is_the_one_that_has_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(FabricError, match=r"192\.0\.2\.1"):
        interface_of("192.0.2.1")


class Recorder:
    """Takes the place of the kernels and of NCCL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from phalanx.kernels.gpu import all_reduce

        self.taken: list[str] = []
        for name in ("one_shot", "two_shot", "one_shot_add_rms_norm"):
            monkeypatch.setattr(all_reduce, name, lambda *_, name=name: self.taken.append(name))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.taken.append("nccl")
        return tensor


@pytest.mark.parametrize("shared", [False, True])
def test_a_sum_goes_the_way_of_its_size(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Recorder(monkeypatch)
    group = PeerGroup(0, 2, GPU, None if shared else ways)  # type: ignore[arg-type]
    group._peers = None  # type: ignore[assignment]
    small, large = one_shot_bytes(2) // 2, TWO_SHOT_BYTES // 2
    for elements in (1, small, small + 1, large, large + 1):
        group.all_reduce(torch.empty(elements, dtype=torch.bfloat16))
    assert ways.taken == ["one_shot", "one_shot", "two_shot", "two_shot", "two_shot" if shared else "nccl"]


def test_only_a_small_sum_is_one_with_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Recorder(monkeypatch)
    group = PeerGroup(0, 2, GPU, None)
    group._peers = None  # type: ignore[assignment]
    for rows, width in ((16, 8192), (17, 8192), (1, 20_000), (3, 16_384)):
        x, weight = torch.ones(rows, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16)
        group.all_reduce_add_norm(x, x.clone(), weight, 1e-5, Form.PLAIN)
    assert ways.taken == ["one_shot_add_rms_norm", "two_shot", "one_shot_add_rms_norm", "one_shot_add_rms_norm"]
    ways.taken.clear()
    wide = torch.ones(1, 40_000)
    group.all_reduce_add_norm(wide, wide.clone(), torch.ones(40_000), 1e-5, Form.PLAIN)
    assert ways.taken == ["one_shot"], "a row that does not fit a slot"


def test_fewer_bytes_are_small_among_more_ranks() -> None:
    assert one_shot_bytes(2) == one_shot_bytes(4) > one_shot_bytes(8)
