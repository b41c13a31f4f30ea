"""The dashboard asks for metrics that are there, under our names and under vLLM's."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.server.metrics import Metrics

DASHBOARD = json.loads((resources.files("phalanx.plan.recipes") / "deploy" / "grafana.json").read_text())


@pytest.mark.parametrize("prefix", ["phalanx:", "vllm:"])
def test_every_metric_of_the_dashboard_is_exposed(prefix: str) -> None:
    families = list(text_string_to_metric_families(Metrics("m", vllm_names=True).expose().decode()))
    kinds = {family.name: family.type for family in families}
    told = {sample.name for family in families for sample in family.samples}
    told |= {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    told |= {f"{name}_total" for name, kind in kinds.items() if kind == "counter"}
    asked = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:phalanx:|vllm:)\w+", target["expr"].replace("${prefix}", prefix))
    }
    assert len(asked) > 15
    assert asked <= told, asked - told


def test_panels_have_places_of_their_own_and_choose_among_both_engines() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["prefix"]["query"].split(",") == ["phalanx:", "vllm:"]
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
