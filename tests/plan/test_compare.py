"""Machines side by side, and all that one of them holds."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.plan.ask import PlanQuestion, ask
from tests.yardstick import is_done_within

run = CliRunner().invoke
MACHINES = "4xH100-SXM,4xRTX4090,8xH200-SXM"


def test_three_machines_are_told_apart() -> None:
    rows = {
        row["machine"]: row
        for row in json.loads(run(app, ["plan", "Llama-3.3-70B", "--machine", MACHINES, "--json"]).stdout)
    }
    assert list(rows) == MACHINES.split(",")
    for name, row in rows.items():
        assert row["effective_gib"] == pytest.approx(row["memory_gib"] - sum(row["kept_gib"].values()))
        assert 0.7 < row["effective_gib"] / row["memory_gib"] < 0.99
        best = ask(PlanQuestion("Llama-3.3-70B", name)).best
        assert best is not None
        assert row["tokens_per_s"] == pytest.approx(best.throughput)
        assert (row["usd_per_million_tokens"], row["best"]) == (best.usd_per_million, best.label)
    assert rows["4xRTX4090"]["formats"] == ["fp8"]
    assert {"bf16", "fp8"} <= set(rows["8xH200-SXM"]["formats"])
    assert "no ECC, no NVLink, no MIG, consumer warranty" in rows["4xRTX4090"]["readiness"]
    assert "ECC, NVSwitch, MIG, data center warranty" in rows["4xH100-SXM"]["readiness"]
    assert rows["8xH200-SXM"]["memory_gib"] == pytest.approx(8 * 140.4, rel=0.01)


def test_the_sum_leads_from_all_memory_to_what_models_can_use() -> None:
    shown = " ".join(run(app, ["plan", "Llama-3.3-70B", "--machine", MACHINES]).stdout.split())
    assert all(name in shown for name in MACHINES.split(","))
    assert "GiB for weights and KV" in shown
    assert "warranty may not cover a data center" in shown


def test_without_a_model_all_that_fits_is_listed() -> None:
    found = {each["model"]: each for each in json.loads(run(app, ["plan", "--machine", "1xRTX4090", "--json"]).stdout)}
    assert "Llama-3.1-8B" in found
    assert "DeepSeek-V3" not in found
    assert found["Llama-3.1-8B"]["max_tokens_per_s_per_user"] == pytest.approx(1008e9 / 16.06e9, rel=0.02)
    assert found["Qwen3-30B-A3B"]["format"] == "awq"
    assert "1xRTX4090 holds" in run(app, ["plan", "--machine", "1xRTX4090"]).stdout


def test_three_machines_take_less_than_three_seconds() -> None:
    """On a machine whose plain work takes 0.1 s."""
    asked = ["plan", "Llama-3.3-70B", "--machine", MACHINES, "--json"]
    assert is_done_within(30, lambda: run(app, asked))
