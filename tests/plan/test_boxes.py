"""Several boxes: ranks stay in theirs where they can, and what crosses the network is paid for."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.errors import ConfigError
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.candidates import Candidate, Plan
from phalanx.plan.recipes import command, recipe
from phalanx.plan.record import launch_of
from phalanx.spec.machine import Machine, MachineError


def planned(machine: str = "2x8xH100-SXM", network: str = "", model: str = "DeepSeek-V3", **told: str) -> Plan:
    return ask(PlanQuestion(model, machine, network=network, **told))  # type: ignore[arg-type]


def by_way(plan: Plan) -> dict[tuple[int, int], Candidate]:
    """vLLM's candidates by TP degree and stages."""
    plain = (each for each in plan.candidates if each.engine.name == "vllm" and each.attention_ranks == 1)
    return {(each.tp, each.stages): each for each in plain}


@pytest.mark.parametrize(
    ("text", "boxes", "per_box", "kind"),
    [
        ("2x8xH100-SXM", 2, 8, "ib"),
        ("16xH100-SXM", 2, 8, "ib"),
        ("4x1xDGX-Spark", 4, 1, "roce"),
        ("2 x 4 x RTX4090", 2, 4, "ethernet"),
    ],
)
def test_boxes_are_read_as_written(text: str, boxes: int, per_box: int, kind: str) -> None:
    machine = Machine.parse(text)
    assert (machine.boxes, machine.per_box, len(machine)) == (boxes, per_box, boxes * per_box)
    assert machine.link(boxes * per_box).kind == kind
    assert machine.link(per_box) == Machine.parse(f"{per_box}x{machine.gpus[0].name}").link(per_box)
    assert Machine.parse(machine.name, "10gbe").link(len(machine)).kind == "ethernet"


def test_wrong_boxes_and_networks_are_answered() -> None:
    with pytest.raises(MachineError, match="Did you mean ib-ndr"):
        Machine.parse("2x8xH100-SXM", "ib-nrd")
    with pytest.raises(MachineError, match="2x8xH100-SXM"):
        Machine.parse("500x8xH100-SXM")
    with pytest.raises(MachineError, match="2x8xH100-SXM"):
        Machine.parse("2x16xH100-SXM")


@pytest.mark.parametrize(("ranks", "starts"), [(8, [0, 8]), (3, [0, 3, 8, 11]), (16, [0]), (4, [0, 4, 8, 12])])
def test_no_group_lies_in_more_boxes_than_it_must(ranks: int, starts: list[int]) -> None:
    machine = Machine.parse("2x8xH100-SXM")
    assert machine.most_replicas(ranks) == len(starts)
    assert [len(group) for group in machine.groups(ranks, len(starts))] == [ranks] * len(starts)


def test_an_all_reduce_between_boxes_is_one_inside_and_a_part_over_the_network() -> None:
    """By hand: 64 MiB over 2 x 8 ranks; each sends an eighth of it over four fifths of its own 50 GB/s."""
    machine, size = Machine.parse("2x8xH100-SXM"), 64 * 2**20
    inside = all_reduce_seconds(size, 8, machine.link(8), "nccl")
    between = 20e-6 + size / 8 / (0.8 * 50e9)
    assert all_reduce_seconds(size, 16, machine.link(16), "nccl") == pytest.approx(inside + between)


def test_tp_and_pipelines_across_are_both_priced() -> None:
    fast, slow = by_way(planned()), by_way(planned(network="10gbe"))
    assert fast.keys() == slow.keys() == {(16, 1), (8, 2)}
    assert slow[16, 1].prediction.tpot.mid > 5 * fast[16, 1].prediction.tpot.mid
    assert 0.6 < slow[8, 2].throughput / fast[8, 2].throughput < 1  # a hand-over a stage, and one back
    assert "PP=2" in planned(network="10gbe", engines="vllm").best.label  # type: ignore[union-attr]
    assert not {each.stages for each in planned().candidates if each.engine.name == "phalanx"} - {1}


def test_a_stage_holds_its_part_of_the_layers() -> None:
    way = by_way(planned())[8, 2]
    whole = ask(PlanQuestion("DeepSeek-V3", "1x8xH200-SXM", engines="vllm", tps="8")).best
    assert whole is not None
    held = way.fit.tightest.weight_bytes / whole.fit.tightest.weight_bytes
    assert 0.5 < held < 0.56  # half of the layers, both ends


def test_replicas_stay_in_their_box() -> None:
    plan = planned(model="Llama-3.3-70B", formats="fp8", engines="vllm")
    ways = {(each.tp, each.stages): each.replicas for each in plan.candidates}
    assert ways[2, 1] == 8
    assert ways[8, 1] == 2
    assert plan.best is not None
    assert plan.best.tp <= 8


def test_the_recipes_of_boxes_are_read_by_their_readers() -> None:
    plan = planned(engines="vllm", tps="8")
    assert plan.best is not None
    launch = launch_of(plan, plan.best)
    assert command(launch)[5:7] == ["--pipeline-parallel-size", "2"]
    script = recipe(launch, "ray")["replica-0.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "--num-gpus=8" in script
    assert "netplan" not in "".join(recipe(launch, "ray"))
    group, service = yaml.safe_load_all(recipe(launch, "k8s")["kubernetes.yaml"])
    assert (group["kind"], group["spec"]["replicas"]) == ("LeaderWorkerSet", 1)
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    for pod in (template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]):
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert service["spec"]["selector"] == {**template["leaderTemplate"]["metadata"]["labels"]}
    for kind in ("shell", "compose", "systemd"):
        with pytest.raises(ConfigError, match="spans 2 machines: vLLM has no"):
            recipe(launch, kind)


def test_one_box_needs_no_ray() -> None:
    plan = ask(PlanQuestion("Llama-3.3-70B", "8xH100-SXM", engines="vllm"))
    assert plan.best is not None
    with pytest.raises(ConfigError, match="needs no Ray"):
        recipe(launch_of(plan, plan.best), "ray")
