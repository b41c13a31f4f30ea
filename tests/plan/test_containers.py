"""Containers: compose files by the specification's own schema, the Containerfile by a parser of such files."""

from __future__ import annotations

import io
import json
from fnmatch import fnmatch
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from dockerfile_parse import DockerfileParser

from phalanx import __version__
from phalanx.plan.recipes import recipe
from phalanx.spec.machine import Machine
from tests.plan.test_recipes import ALL, launch

WHEEL = f"phalanx-{__version__}-py3-none-any.whl"


@cache
def compose_schema() -> Any:
    schema = get_builtin_schema("vendor.compose-spec")
    return jsonschema.validators.validator_for(schema)(schema)


def check_compose(text: str) -> Any:
    composed = yaml.safe_load(text)
    compose_schema().validate(composed)
    return composed


@pytest.mark.parametrize(
    ("engine", "machine", "shape"),
    [
        *((engine, "8xH100-SXM", {}) for engine in ALL),
        *((engine, "1xDGX-Spark", {"tp": 1, "replicas": 1}) for engine in ALL),
        ("vllm", "8xMI300X", {}),
        ("sglang", "8xMI300X", {}),
        ("vllm", "8xGaudi3", {}),
    ],
)
def test_a_compose_file_fits_the_specification_s_schema_and_has_all_it_names(
    engine: str, machine: str, shape: dict[str, int]
) -> None:
    files = recipe(launch(engine, machine=Machine.parse(machine), **shape), "compose")
    composed = check_compose(files["compose.yaml"])
    there = {"${HF_HOME", *composed.get("volumes", ()), *(f"./{name}" for name in files)}
    for service in composed["services"].values():
        assert {volume.split(":")[0] for volume in service["volumes"]} <= there
        assert "build" not in service or service["build"]["dockerfile"] in files


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("restart: unless-stopped", "restarts: unless-stopped"),
        ("driver: nvidia", "drivers: nvidia"),
        ("capabilities: [gpu]", "capabilities: gpu"),
        ("services:", "service:"),
    ],
)
def test_the_schema_finds_what_is_misspelt(right: str, wrong: str) -> None:
    text = recipe(launch("phalanx"), "compose")["compose.yaml"]
    assert right in text
    with pytest.raises(jsonschema.ValidationError):
        check_compose(text.replace(right, wrong))


def faults(text: str, beside: set[str]) -> list[str]:
    """What is wrong with a Containerfile that is built where these files are."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    names = [name for name, _ in steps]
    found = [f"ADD {value}" for name, value in steps if name == "ADD"]
    found += [f"FROM {value}" for name, value in steps if name == "FROM" and not value.startswith("${")]
    for sources in (value.split()[:-1] for name, value in steps if name == "COPY"):
        found += [f"COPY {each}" for each in sources if not any(fnmatch(file, each) for file in beside)]
    users = [value for name, value in steps if name == "USER"]
    if not users or users[-1] in ("0", "root") or names.index("USER") < len(names) - names[::-1].index("RUN"):
        found.append(f"USER {users}")
    checks = [value for name, value in steps if name == "HEALTHCHECK" and value != "NONE"]
    return found if checks else [*found, "HEALTHCHECK"]


def test_the_container_is_not_root_s_has_a_health_check_and_takes_the_wheel_beside_it() -> None:
    files = recipe(launch("phalanx"), "compose")
    text = files["Containerfile"]
    assert faults(text, {*files, WHEEL}) == []
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    assert parser.parent_images == ["python:3.12-slim"]
    given = DockerfileParser(fileobj=io.BytesIO(text.encode()), build_args={"BASE": "mirror/python:3.13"})
    assert given.parent_images == ["mirror/python:3.13"]
    words = json.loads(parser.cmd)
    assert words[:2] == ["phalanx", "serve"]
    probed = next(step["value"] for step in parser.structure if step["instruction"] == "HEALTHCHECK")
    assert f":{words[words.index('--admin-port') + 1]}/ready" in probed


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("COPY phalanx-", "COPY other-", "COPY other-*.whl"),
        ("COPY phalanx-*.whl", "ADD https://example.org/phalanx.whl", "ADD https://example.org/phalanx.whl /tmp/"),
        ("USER 10001", "USER root", "USER ['root']"),
        ("USER 10001", "", "USER []"),
        ("HEALTHCHECK", "LABEL check=", "HEALTHCHECK"),
        ("${BASE}", "python:3.12-slim", "FROM python:3.12-slim"),
    ],
)
def test_a_fault_of_a_container_is_found(right: str, wrong: str, fault: str) -> None:
    text = recipe(launch("phalanx"), "compose")["Containerfile"]
    assert fault in faults(text.replace(right, wrong), {WHEEL})
