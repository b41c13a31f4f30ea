"""The files of a cluster are such as their readers accept, and agree with each other."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from ipaddress import IPv4Interface
from pathlib import Path

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.cluster.commands import ray_environment, ray_start
from phalanx.cluster.hosts import Cluster, parse_hosts
from phalanx.cluster.recipe import Recipe, default_model, recipe
from phalanx.errors import ConfigError
from phalanx.plan.recipes import spark
from phalanx.spec.machine import Machine

HELD_BACK = ("RestartSteps", "RestartMaxDelaySec")
"""Known to systemd from 254 on; older ones say that they ignore them."""


@pytest.fixture(scope="module")
def four() -> Recipe:
    return recipe("4xDGX-Spark")


def cluster_of(made: Recipe) -> Cluster:
    return parse_hosts(made.files["hosts.toml"], Path("hosts.toml"))


def unit(text: str) -> configparser.ConfigParser:
    """As systemd reads it, but for keys that come twice, which are joined by newlines."""
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(text)
    return parsed


def variables(text: str) -> dict[str, str]:
    pairs = [shlex.split(line.partition("=")[2])[0] for line in text.splitlines() if line.startswith("Environment=")]
    return dict(pair.split("=", 1) for pair in pairs)


def test_every_machine_has_its_files(four: Recipe) -> None:
    each = {f"node-{node}/{name}" for node in range(4) for name in ("40-cx7.yaml", "phalanx-ray.service")}
    shared = {"README.md", "hosts.toml", "serve.sh", "90-cx7.conf", "90-memlock.conf"}
    assert set(four.files) == each | shared | {"node-0/phalanx-serve.service"}
    assert four.warnings == ()


def test_both_functions_have_addresses_in_different_subnets_with_jumbo_frames(four: Recipe) -> None:
    seen: set[str] = set()
    for node in range(4):
        ports = yaml.safe_load(four.files[f"node-{node}/40-cx7.yaml"])["network"]["ethernets"]
        assert list(ports) == list(spark.INTERFACES)
        addresses = [IPv4Interface(port["addresses"][0]) for port in ports.values()]
        assert addresses[0].network != addresses[1].network
        assert all(port["mtu"] == 9000 and port["dhcp4"] is False for port in ports.values())
        seen |= {str(address.ip) for address in addresses}
        assert str(addresses[0].ip) == cluster_of(four).nodes[node].ip
    assert len(seen) == 8


def test_our_own_reader_takes_hosts_toml(four: Recipe) -> None:
    cluster = cluster_of(four)
    assert [node.host for node in cluster.nodes] == ["local", "spark-1", "spark-2", "spark-3"]
    assert cluster.ranks() == {f"192.168.100.{10 + rank}": [rank] for rank in range(4)}
    assert cluster.head.rdma == ("rocep1s0f1", "roceP2p1s0f1")


def test_the_services_start_what_up_would_start(four: Recipe) -> None:
    cluster = cluster_of(four)
    for number, node in enumerate(cluster.nodes):
        text = four.files[f"node-{number}/phalanx-ray.service"]
        assert shlex.split(unit(text)["Service"]["ExecStart"]) == ray_start(cluster, node, block=True)
        assert variables(text) == ray_environment(node)
        assert unit(text)["Service"]["ExecStartPre"] == f"/usr/bin/test -s {node.token_path}"


@pytest.mark.parametrize("name", ["phalanx-ray", "phalanx-serve"])
def test_a_service_does_not_restart_for_ever(four: Recipe, name: str) -> None:
    parsed = unit(four.files[f"node-0/{name}.service"])
    tries, window = int(parsed["Unit"]["StartLimitBurst"]), int(parsed["Unit"]["StartLimitIntervalSec"])
    assert tries * int(parsed["Service"]["RestartSec"]) < window
    assert tries < 35
    assert parsed["Service"]["Restart"] == "on-failure"
    assert parsed["Service"]["LimitMEMLOCK"] == "infinity"


def test_serving_waits_for_all_machines(four: Recipe) -> None:
    parsed = unit(four.files["node-0/phalanx-serve.service"])
    assert parsed["Unit"]["Requires"] == "phalanx-ray.service"
    assert parsed["Service"]["ExecStartPre"].endswith("--expect " + " ".join(n.ip for n in cluster_of(four).nodes))
    words = shlex.split(parsed["Service"]["ExecStart"])
    assert words[:3] == ["/opt/phalanx/bin/phalanx", "serve", "zai-org/GLM-4.6-FP8"]
    assert shlex.join(words) in four.files["serve.sh"]
    assert shlex.join(words) in four.files["README.md"]
    for flag, value in {"--tp": "4", "--executor": "ray", "--ray-address": "192.168.100.10:6379"}.items():
        assert words[words.index(flag) + 1] == value


def test_phalanx_s_own_command_line_takes_the_serve_command(four: Recipe) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    if "executor" not in {parameter.name for parameter in serve.params}:
        pytest.skip("phalanx serve has no --executor")
    words = shlex.split(unit(four.files["node-0/phalanx-serve.service"])["Service"]["ExecStart"])[2:]
    assert serve.make_context("serve", words).params["executor"] == "ray"


def test_systemd_finds_nothing_wrong(four: Recipe, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name, text in four.files.items():
        if name.startswith("node-0/") and name.endswith(".service"):
            (tmp_path / Path(name).name).write_text(
                text.replace("/opt/phalanx/bin/", "/bin/").replace("/bin/phalanx", "/bin/sh")
            )
    words = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stderr.splitlines()
    ours = [line for line in told if "phalanx" in line and not any(key in line for key in HELD_BACK)]
    assert [line for line in ours if "is not executable" not in line] == []


def test_scripts_and_settings_are_well_formed(four: Recipe) -> None:
    assert subprocess.run(["bash", "-n"], input=four.files["serve.sh"], text=True, check=False).returncode == 0
    settings = [line for line in four.files["90-cx7.conf"].splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9_.]+ = [0-9 ]+", line) for line in settings)
    assert "vm.swappiness = 1" in settings
    assert "* - memlock unlimited" in four.files["90-memlock.conf"].splitlines()


def test_the_steps_have_checks_and_no_hole(four: Recipe) -> None:
    text = four.files["README.md"]
    for words in ("ibdev2netdev", "200000Mb/s", "ping -M do -s 8972", "21.9 GB/s", "mode 600", "drop_caches", "NCCL"):
        assert words in text
    assert "${" not in text
    assert "$host:" in text
    assert "hf download zai-org/GLM-4.6-FP8" in text


def test_two_are_joined_by_a_cable_and_more_by_a_switch(four: Recipe) -> None:
    assert "A switch with at least 4 ports" in four.files["README.md"]
    two = recipe("2xDGX-Spark", "Qwen3-32B")
    assert "No switch." in two.files["README.md"]
    assert len(cluster_of(two).nodes) == 2


def test_three_in_a_ring_are_warned_of() -> None:
    made = recipe("3xSpark", "Llama-3.3-70B")
    assert "In a ring every cable is a subnet of its own" in made.warnings[0]
    assert made.warnings[0] in made.files["README.md"]


@pytest.mark.parametrize(
    ("machine", "model", "code", "words"),
    [
        ("2xDGX-Spark", "Llama-3.1-405B", "does_not_fit", "Rank 0 needs 378.0 GiB for weights"),
        ("2xDGX-Spark", "Lama-3", "unknown_model", "Did you mean"),
        ("4xH100-SXM", None, "no_cluster_recipe", "2xDGX-Spark"),
        ("2xDGX-Spark+2xH100-SXM", None, "no_cluster_recipe", "2xDGX-Spark"),
        ("DGX-Spark", None, "no_cluster_recipe", "needs no cluster"),
        ("9xDGX-Spark", None, "no_cluster_recipe", "Use 2 to 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_planner_s_reason(
    machine: str, model: str | None, code: str, words: str
) -> None:
    with pytest.raises(Exception, match=re.escape(words)) as refused:
        recipe(machine, model)
    assert refused.value.code == code  # type: ignore[attr-defined]


def test_the_default_is_the_largest_that_fits() -> None:
    assert default_model(Machine.parse("4xDGX-Spark")) == "zai-org/GLM-4.6-FP8"
    assert default_model(Machine.parse("2xDGX-Spark")) == "zai-org/GLM-4.5-Air-FP8"
    with pytest.raises(ConfigError, match=re.escape("The largest that fits here: zai-org/GLM-4.5-Air-FP8")):
        recipe("2xDGX-Spark", "Qwen3-235B-A22B")


def test_a_checkpoint_is_served_in_a_format_it_has() -> None:
    """Phalanx converts nothing while loading, so bf16 weights are not planned as FP8."""
    script = recipe("4xDGX-Spark", "Qwen2.5-72B").files["serve.sh"]
    assert "serve Qwen/Qwen2.5-72B-Instruct --tp 4 --dtype bf16" in script
    assert "serve Qwen/Qwen3-235B-A22B-FP8 " in recipe("4xDGX-Spark", "Qwen3-235B-A22B").files["serve.sh"]


def test_the_command_writes_files_with_their_modes_or_prints_them(tmp_path: Path) -> None:
    words = ["cluster", "recipe", "2xDGX-Spark", "--model", "Qwen3-8B"]
    written = CliRunner().invoke(app, [*words, "--output", str(tmp_path)])
    assert written.exit_code == 0, written.output
    assert "10 files" in written.output
    assert (tmp_path / "node-1" / "40-cx7.yaml").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "serve.sh").stat().st_mode & 0o100
    printed = CliRunner().invoke(app, words).output
    assert "# ---- node-1/40-cx7.yaml\n" in printed
