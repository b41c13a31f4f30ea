"""The all-reduce, explained: shares that agree with the step, algorithms by size, and padding."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.collectives import algorithm, all_reduces, padding_lines
from phalanx.spec.machine import Machine

run = CliRunner().invoke


def test_every_degree_is_told_with_the_share_of_the_plan_itself() -> None:
    plan = ask(PlanQuestion("Llama-3.3-70B", "8xH100-SXM", engines="vllm", formats="fp8"))
    found = {each.tp: each for each in all_reduces(plan)}
    assert found.keys() == {2, 4, 8}
    for each in plan.side_by_side:
        if each.tp > 1:
            assert found[each.tp].decode_share == pytest.approx(each.prediction.all_reduce_share)
            assert 0 < found[each.tp].prompt_share < 1
    shares = [each.decode_share for each in found.values()]
    assert shares == sorted(shares)
    told = json.loads(run(app, ["plan", "Llama-3.3-70B", "--machine", "8xH100-SXM", "--json"]).stdout)
    assert {each["tp"] for each in told["all_reduces"]} >= {2, 4, 8}


@pytest.mark.parametrize(
    ("size", "machine", "ranks", "name"),
    [
        (64 << 10, "8xH100-SXM", 8, "one-shot"),
        (2 << 20, "8xH100-SXM", 8, "two-shot"),
        (64 << 20, "8xH100-SXM", 8, "NVLS"),
        (64 << 10, "4xRTX4090", 4, "ring"),
        (64 << 10, "8xL40S", 8, "tree"),
        (64 << 20, "8xMI300X", 8, "ring"),
        (64 << 10, "2x8xH100-SXM", 16, "one-shot: latency counts, every rank reads all, then a ring between boxes"),
    ],
)
def test_the_algorithm_goes_by_size_ranks_and_link(size: int, machine: str, ranks: int, name: str) -> None:
    assert algorithm(size, ranks, Machine.parse(machine).link(ranks)).startswith(name)


def test_padding_is_a_way_out_where_blocks_do_not_divide() -> None:
    """29,568 columns in groups of 128 over 8 ranks: 28.875 groups a rank, so 29 of them, 29,696 columns."""
    plan = ask(PlanQuestion("Qwen2.5-72B", "8xH100-SXM", engines="vllm,phalanx", formats="awq,fp8", tps="4,8"))
    lines = " ".join(padding_lines(plan))
    assert "awq at TP=8 would divide with an FFN of 29,696 columns for 29,568 (+0.4%" in lines
    assert "Phalanx needs none" in lines
