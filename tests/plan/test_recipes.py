"""Recipes are files that their readers accept: shells, YAML and unit parsers, and the engines' own command lines."""

from __future__ import annotations

import argparse
import configparser
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from phalanx.errors import ConfigError
from phalanx.models import catalog
from phalanx.plan.ask import PlanQuestion, ask
from phalanx.plan.engines import ENGINES
from phalanx.plan.recipes import KINDS, WAYS, Launch, command, recipe
from phalanx.plan.recipes.launch import trtllm_options
from phalanx.plan.recipes.spark_flags import spark_flags
from phalanx.plan.record import launch_of
from phalanx.spec.machine import Machine

ALL = list(ENGINES)


def launch(engine: str = "vllm", **changed: Any) -> Launch:
    told: dict[str, Any] = {
        "model": "meta-llama/Llama-3.3-70B-Instruct",
        "engine": ENGINES[engine],
        "machine": Machine.parse("8xH100-SXM"),
        "tp": 4,
        "replicas": 2,
        "weight_format": "bf16",
        "kv_format": "bf16",
        "max_model_len": 1280,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
    }
    return Launch(**told | changed)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        (
            "phalanx",
            {"--tp": "4", "--max-model-len": "1280", "--max-num-seqs": "16", "--max-num-batched-tokens": "8192"},
        ),
        ("vllm", {"--tensor-parallel-size": "4", "--max-model-len": "1280", "--gpu-memory-utilization": "0.9"}),
        ("sglang", {"--tp-size": "4", "--context-length": "1280", "--max-running-requests": "16"}),
        ("trtllm", {"--tp_size": "4", "--max_seq_len": "1280", "--max_batch_size": "16", "--max_num_tokens": "8192"}),
    ],
)
def test_a_command_says_what_was_planned(engine: str, flags: dict[str, str]) -> None:
    words = command(launch(engine), port=8003)
    assert "meta-llama/Llama-3.3-70B-Instruct" in words
    assert {flag: value_of(words, flag) for flag in flags} == flags
    assert (value_of(words, "--host"), value_of(words, "--port")) == ("127.0.0.1", "8003")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("phalanx", ["--kv-cache-dtype fp8"]),
        ("vllm", ["--enable-expert-parallel", "--kv-cache-dtype fp8"]),
        ("sglang", ["--ep-size 4", "--kv-cache-dtype fp8_e4m3"]),
        ("trtllm", ["--ep_size 4"]),
    ],
)
def test_experts_formats_and_kv_are_told(engine: str, words: list[str]) -> None:
    plain = shlex.join(command(launch(engine)))
    told = shlex.join(command(launch(engine, expert_parallel=True, kv_format="fp8")))
    for word in words:
        assert word in told
        assert word not in plain


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        ("phalanx", "--state-dtype bf16"),
        ("vllm", "--mamba-ssm-cache-dtype bfloat16"),
        ("sglang", "--mamba-ssm-dtype bfloat16"),
        ("trtllm", "  mamba_ssm_cache_dtype: bfloat16"),
    ],
)
def test_narrow_states_are_told(engine: str, word: str) -> None:
    plain, narrow = (launch(engine, narrow_states=asked) for asked in (False, True))
    told = [shlex.join(command(each)) + "\n" + trtllm_options(each) * (engine == "trtllm") for each in (plain, narrow)]
    assert [word in each for each in told] == [False, True]


def test_sglang_leaves_what_fit_leaves() -> None:
    static = float(value_of(command(launch("sglang")), "--mem-fraction-static"))
    assert static == pytest.approx((81_559 - 512 - 1.5 * 8192 - 512 - 4 * 128) / 81_559, abs=1e-3)


def test_unified_memory_is_not_taken_whole() -> None:
    spark = launch(machine=Machine.parse("4xDGX-Spark"), replicas=1)
    assert value_of(command(spark), "--gpu-memory-utilization") == "0.85"


def test_the_shell_script_starts_each_replica_on_its_own_gpus_and_port() -> None:
    script = recipe(launch(), "shell")["serve.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 vllm" in script
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 vllm" in script
    assert "--port 8000" in script
    assert "--port 8001" in script


@pytest.mark.parametrize("engine", ALL)
def test_compose_reserves_the_gpus_and_publishes_to_loopback(engine: str) -> None:
    files = recipe(launch(engine), "compose")
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert list(services) == ["replica-0", "replica-1"]
    second = services["replica-1"]
    device = second["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["device_ids"] == ["4", "5", "6", "7"]
    assert second["ports"] == ["127.0.0.1:8001:8000"]
    own = ("--admin-port", "9000") if engine == "phalanx" else ()
    assert second["command"] == command(launch(engine), host="0.0.0.0", extra=own)
    assert ("Containerfile" in files) == ("grafana.json" in files) == (engine == "phalanx")
    assert ("trtllm.yaml" in files) == (engine == "trtllm")


@pytest.mark.parametrize("engine", ALL)
def test_kubernetes_asks_for_the_gpus_of_a_replica(engine: str) -> None:
    documents = list(yaml.safe_load_all(recipe(launch(engine), "k8s")["kubernetes.yaml"]))
    deployment, service = documents[:2]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert deployment["spec"]["replicas"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    own = ("--admin-port", "9000", "--api-key-file", "/etc/phalanx/keys/keys") if engine == "phalanx" else ()
    assert container["command"] == command(launch(engine), host="0.0.0.0", extra=own)
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["metadata"]["name"] == "llama-3-3-70b-instruct"
    if engine == "trtllm":
        options = yaml.safe_load(documents[-1]["data"]["trtllm.yaml"])
        assert options["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9


@pytest.mark.parametrize("engine", ALL)
def test_a_systemd_unit_starts_one_replica(engine: str) -> None:
    files = recipe(launch(engine), "systemd")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(files[f"{engine}-1.service"])
    assert shlex.split(unit["Service"]["ExecStart"]) == ["/usr/bin/env", *command(launch(engine), port=8001)]
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7" in files[f"{engine}-1.service"]
    assert unit["Service"]["LimitMEMLOCK"] == "infinity"


def test_ray_over_four_dgx_spark() -> None:
    files = recipe(launch(machine=Machine.parse("4xDGX-Spark"), replicas=1), "ray")
    for node in range(4):
        ports = yaml.safe_load(files[f"node-{node}/40-cx7.yaml"])["network"]["ethernets"]
        assert {name: port["addresses"] for name, port in ports.items()} == {
            "enp1s0f1np1": [f"192.168.100.{10 + node}/24"],
            "enP2p1s0f1np1": [f"192.168.101.{10 + node}/24"],
        }
    script = files["replica-0.sh"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for needed in (
        "ray start --head",
        "ray start --block",
        "NCCL_SOCKET_IFNAME",
        "ulimit -l",
        "-ge 4",
        "0.85",
        "RAY_AUTH_MODE=token",
    ):
        assert needed in script
    assert "--distributed-executor-backend ray" in script
    assert "memlock unlimited" in files["90-memlock.conf"]
    assert "net.core.rmem_max" in files["90-cx7.conf"]
    assert "NCCL_IB_HCA=${HCA:-rocep1s0f1,roceP2p1s0f1}" in script


@pytest.mark.parametrize("engine", ALL)
def test_an_engine_over_several_machines_has_its_own_recipes_and_no_others(engine: str) -> None:
    spread = launch(engine, machine=Machine.parse("4xDGX-Spark"), replicas=1)
    ways = [way for way in WAYS[engine] if way != "k8s"]
    for kind in KINDS:
        if kind in ways:
            script = recipe(spread, kind)["replica-0.sh"]
            assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
            assert "NCCL_SOCKET_IFNAME=$INTERFACE" in script
            assert script.index("drop_caches") < script.index(command(spread)[0])
        else:
            with pytest.raises(ConfigError, match=f"--recipe {ways[0]}"):
                recipe(spread, kind)


def test_replicas_on_machines_of_one_gpu_each_use_their_only_gpu() -> None:
    script = recipe(launch(machine=Machine.parse("2xDGX-Spark"), tp=1), "shell")["serve.sh"]
    assert script.count("CUDA_VISIBLE_DEVICES=0 vllm") == 2


def test_a_spark_s_container_reaches_the_fabric_and_drops_caches_first() -> None:
    """The guides' warnings: host network, RDMA devices, memory that may be pinned, and no page cache in the way."""
    alone = launch(machine=Machine.parse("1xDGX-Spark"), tp=1, replicas=1)
    service = yaml.safe_load(recipe(alone, "compose")["compose.yaml"])["services"]["replica-0"]
    assert service["network_mode"] == "host"
    assert service["devices"] == ["/dev/infiniband"]
    assert service["ulimits"] == {"memlock": -1}
    assert "ports" not in service
    script = recipe(launch(machine=Machine.parse("4xDGX-Spark"), replicas=1), "ray")["replica-0.sh"]
    assert script.index("drop_caches") < script.index("vllm serve")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include"):
        assert f"export {name}=" in script
    assert value_of(command(alone), "--gpu-memory-utilization") == "0.85"
    experts = launch(machine=Machine.parse("4xDGX-Spark"), replicas=1, expert_parallel=True)
    assert "--enable-expert-parallel" not in command(experts)
    assert recipe(alone, "shell")["serve.sh"].index("drop_caches") < recipe(alone, "shell")["serve.sh"].index("vllm")
    assert "drop_caches" in recipe(alone, "systemd")["vllm-0.service"]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("gpt-oss-120b", ("TRITON_ATTN", "16", False, "openai_gptoss", "openai")),
        ("Qwen3.5-122B-A10B", ("FLASHINFER", None, True, "qwen3", "qwen3_xml")),
        ("GLM-4.7-Flash", ("TRITON_MLA", "64", False, "glm47", "glm47")),
        ("Llama-3.3-70B", ("FLASHINFER", "16", False, None, "llama3_json")),
    ],
)
def test_vllm_on_a_spark_is_told_what_its_users_tell_it(model: str, told: tuple[Any, ...]) -> None:
    """Which backend runs there, block size, parsers, and the text part of a model that sees images too."""
    plan = ask(PlanQuestion(model, "2xDGX-Spark", engines="vllm", tps="2", formats="awq" if "Llama" in model else ""))
    assert plan.best is not None
    words = command(launch_of(plan, plan.best))
    found = {flag: value_of(words, flag) if flag in words else None for flag in SPARK_FLAGS}
    backend, block, text_only, thoughts, tools = told
    assert list(found.values()) == [backend, block, thoughts, tools]
    assert ("--language-model-only" in words) == text_only
    assert not set(found) & set(command(launch()))


SPARK_FLAGS = ("--attention-backend", "--block-size", "--reasoning-parser", "--tool-call-parser")


def test_parsers_are_those_of_vllm() -> None:
    """Names of its two registries (vLLM at 0064cc9)."""
    thoughts = {"deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "kimi_k2", "minimax_m2", "mistral"}
    thoughts |= {"openai_gptoss", "qwen3"}
    tools = {"deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm45", "glm47", "hermes", "kimi_k2"}
    tools |= {"llama3_json", "llama4_pythonic", "minimax_m2", "mistral", "openai", "qwen3_coder", "qwen3_xml"}
    for entry in catalog.entries().values():
        flags = spark_flags(entry.spec, entry.name)
        for flag, known in (("--reasoning-parser", thoughts), ("--tool-call-parser", tools)):
            assert flag not in flags or value_of(list(flags), flag) in known


def test_blocks_that_do_not_divide_on_a_spark_are_a_warning_not_a_flag() -> None:
    """231 blocks of 128 columns over two: vLLM would deal whole experts, which fails there."""
    plan = ask(PlanQuestion("Qwen3-30B-A3B", "4xDGX-Spark", engines="vllm", tps="4", formats="fp8"))
    spread = next(each for each in plan.candidates if each.expert_parallel)
    told = launch_of(plan, spread)
    assert "FP8 blocks do not divide by TP=4" in told.note
    assert "--enable-expert-parallel" not in command(told)
    assert f"# Beware: {told.note}" in recipe(told, "ray")["replica-0.sh"]


def test_sglang_and_tensorrt_llm_span_boxes_in_their_own_ways() -> None:
    boxes = {"machine": Machine.parse("2x8xH100-SXM"), "tp": 8, "replicas": 1, "stages": 2}
    numbered = recipe(launch("sglang", **boxes), "shell")["replica-0.sh"]
    for words in ("--nnodes 2", '--node-rank "$RANK"', '--dist-init-addr "$MEET"', "--pp-size 2", "--tp-size 8"):
        assert words in numbered
    group = next(yaml.safe_load_all(recipe(launch("sglang", **boxes), "k8s")["kubernetes.yaml"]))
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    assert "--node-rank $LWS_WORKER_INDEX" in worker["command"][2]
    files = recipe(launch("trtllm", **boxes), "shell")
    assert "exec mpirun -n 16" in files["replica-0.sh"]
    assert "trtllm-llmapi-launch trtllm-serve" in files["replica-0.sh"]
    assert "trtllm.yaml" in files
    ours = recipe(launch("phalanx", **boxes | {"tp": 16, "stages": 1}), "ray")["replica-0.sh"]
    assert "--executor ray" in ours
    assert '--interface "$INTERFACE"' in ours
    for script in (numbered, files["replica-0.sh"], ours):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean compose"):
        recipe(launch(), "docker-compose")


@pytest.mark.parametrize("name", ["x; rm -rf /", "$(reboot)", "a'b", 'a"b', "a\nb", "", "--trust-remote-code"])
def test_a_model_name_that_a_shell_would_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch(model=name)
    assert refused.value.code == "bad_model_name"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ray"])
@pytest.mark.parametrize("engine", ALL)
def test_every_engine_has_every_recipe(engine: str, kind: str) -> None:
    files = recipe(launch(engine, model="/models/my model"), kind)
    assert all(text.endswith("\n") for text in files.values())


def test_vllm_s_own_parser_takes_the_command() -> None:
    """Where vLLM is installed; its parser lives in one of two places."""
    vllm = pytest.importorskip("vllm", exc_type=ImportError)
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    told = launch(expert_parallel=True, kv_format="fp8")
    words = command(told, extra=("--distributed-executor-backend", "ray"))
    read: argparse.Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    assert vllm.__version__
    assert (read.tensor_parallel_size, read.quantization, read.kv_cache_dtype) == (4, "fp8", "fp8")
    assert (read.max_model_len, read.max_num_seqs, read.max_num_batched_tokens) == (1280, 16, 8192)
    assert read.enable_expert_parallel


@pytest.mark.parametrize("engine", ALL)
def test_manifests_fit_kubernetes_own_schema(engine: str) -> None:
    documents = list(yaml.safe_load_all(recipe(launch(engine), "k8s")["kubernetes.yaml"]))
    for document in documents:
        kubernetes_validate.validate(document, "1.34", strict=True)
    kinds = {document["kind"]: document for document in documents}
    assert {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"} <= kinds.keys()
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    (claim,) = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claim["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert kinds["PodDisruptionBudget"]["spec"]["selector"] == kinds["Deployment"]["spec"]["selector"]


def test_phalanx_in_kubernetes_is_nobody_special_and_probed_without_a_secret() -> None:
    deployment = next(yaml.safe_load_all(recipe(launch("phalanx"), "k8s")["kubernetes.yaml"]))
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == int(value_of(container["command"], "--admin-port"))
    keys = value_of(container["command"], "--api-key-file")
    assert any(keys.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


def test_a_unit_is_reloaded_by_a_signal() -> None:
    unit = recipe(launch("phalanx"), "systemd")["phalanx-0.service"]
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit


def test_no_text_names_a_package_that_is_not_published() -> None:
    root = Path(__file__).parents[2]
    texts = [*root.glob("*.md"), *root.glob("docs/*.md"), *(root / "src").rglob("*")]
    read = [path for path in texts if path.suffix in (".py", ".md", "") and path.is_file()]
    assert len(read) > 300
    for path in read:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"pip install [^@]*\bphalanx\b(?![-/])[^@]*$", line), f"{path}: {line}"
