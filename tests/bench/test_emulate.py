"""The TP scaling lab: one rank's real share, with the waiting of a modelled fabric."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.bench.emulate import emulate, step_collectives
from phalanx.cost.allreduce import all_reduce_seconds
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import ConfigError, LayoutError
from phalanx.fabric.emulated import EmulatedGroup
from phalanx.models import read_config
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.start import start_engine
from phalanx.spec.machine import Machine
from tests.weights.conftest import CONFIGS, random_tensors, save_folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_folder(tmp_path, CONFIGS["llama"], random_tensors(read_config(CONFIGS["llama"])))


def run(model: Path, degrees: str = "1,3", **options: object) -> list[dict[str, float]]:
    given: dict[str, object] = {"all_reduce_us": 500.0, "machine": None} | options
    output = model / "out.json"
    config = EngineConfig(model=str(model), dtype="fp32")
    emulate(config, "2x8x6", degrees, repeats=1, output=output, **given)  # type: ignore[arg-type]
    return json.loads(output.read_text())["results"]


def test_a_step_waits_for_every_collective_it_has(tiny: Path) -> None:
    """What is counted by hand is what a real step asks of the group."""
    group = EmulatedGroup(3, lambda size: 0.0, torch.device("cpu"))
    engine = start_engine(EngineConfig(model=str(tiny)), tiny, lambda done, total: None, group)
    engine.add([1, 2, 3], SamplingParams(temperature=0, ignore_eos=True, max_tokens=3))
    engine.step()
    before = group.calls
    engine.step()
    spec = read_config(tiny)
    assert group.calls - before == step_collectives(spec, 1, 4, lambda size: 1.0)
    engine.close()


def test_times_are_split_into_compute_and_all_reduce(tiny: Path) -> None:
    one, three = run(tiny)
    assert (one["tp"], one["all_reduce_ms"], one["efficiency"]) == (1, 0.0, 1.0)
    assert three["all_reduce_ms"] == pytest.approx(0.5 * (2 * 2 + 2))
    assert three["compute_ms"] + three["all_reduce_ms"] == pytest.approx(three["tpot_ms"])
    assert three["tok_s_per_gpu"] == pytest.approx(three["tok_s"] / 3)
    assert three["efficiency"] == pytest.approx(three["tok_s_per_gpu"] / one["tok_s_per_gpu"])


def test_the_fabric_may_come_from_the_cost_model(tiny: Path) -> None:
    (two,) = run(tiny, "2", all_reduce_us=None, machine="2xH100-SXM")
    link = Machine.parse("2xH100-SXM").link(2)
    small = all_reduce_seconds(2 * 64 * 4, 2, link, "nccl")
    logits = all_reduce_seconds(2 * 80 * 4, 2, link, "nccl")
    assert two["all_reduce_ms"] == pytest.approx((5 * small + logits) * 1e3)


def test_what_cannot_be_emulated_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="2,4,8"):
        run(tiny, "2,x")
    with pytest.raises(ConfigError, match="--all-reduce-us"):
        run(tiny, "2", all_reduce_us=None)
    with pytest.raises(LayoutError):
        run(tiny, "7")
