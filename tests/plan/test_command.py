"""`phalanx plan` as a person and a program meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.models import catalog

run = CliRunner().invoke
PLAN = ["plan", "Llama-3.3-70B", "--machine", "8xH100-SXM"]


@pytest.mark.usefixtures("predictor")
def test_a_person_sees_the_ranking_the_sum_the_price_and_the_command() -> None:
    result = run(app, [*PLAN, "--engine", "vllm", "--slo", "ttft:800,tpot:50", "--explain"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for words in (
        "Ranking",
        "vLLM",
        "tok/s",
        "all-reduce",
        "left for KV",
        "gpu_memory_utilization 0.9",
        "rent 26.00 $/h",
        "2026-08-22",
        "GPUs 5.6 kW",
        "Left out",
        "--tensor-parallel-size",
    ):
        assert words in result.output


@pytest.mark.usefixtures("predictor")
def test_a_program_gets_the_same_as_json() -> None:
    answer = json.loads(run(app, [*PLAN, "--engine", "vllm", "--slo", "tpot:50", "--json"]).output)
    assert answer["machine"] == "8xH100-SXM"
    assert answer["model"]["parameters"] == 70_553_706_496
    assert answer["meets_slo"] is True
    assert answer["best"] == answer["candidates"][0]
    assert [each["tp"] for each in answer["side_by_side"]] == [1, 2, 4, 8]
    assert answer["side_by_side"][0]["scaling_efficiency"] == 1
    interval = answer["best"]["tpot_ms"]
    assert answer["side_by_side"][3]["ttft_p99_ms"] == pytest.approx(64)
    assert interval["low"] < interval["mid"] < interval["high"]
    rank = answer["fit"]["ranks"][0]
    assert sum(line["bytes"] for line in rank["lines"]) == rank["kv_bytes"]
    assert answer["cost"]["prices_as_of"] == ["H100-SXM: rent 2026-08-22; 1-yr reserved 2.35 in 2026-03; buy 2026"]
    assert answer["power_w"]["sustained"] < answer["power_w"]["limit"] < answer["power_w"]["transient"]
    assert {each["code"] for each in answer["excluded"]} == {"illegal_shape", "does_not_fit"}
    assert answer["command"][0] == "vllm"


@pytest.mark.usefixtures("predictor")
def test_engine_tp_and_formats_narrow_the_choice() -> None:
    options = ["--engine", "sglang,trtllm", "--tp", "2,4", "--format", "fp8,bf16", "--kv-format", "fp8", "--json"]
    answer = json.loads(run(app, [*PLAN, *options]).output)
    found = {(each["engine"], each["tp"], each["weight_format"]) for each in answer["candidates"]}
    assert found == {(engine, tp, name) for engine in ("sglang", "trtllm") for tp in (2, 4) for name in ("fp8", "bf16")}
    assert {each["kv_format"] for each in answer["candidates"]} == {"fp8"}


@pytest.mark.usefixtures("predictor")
def test_the_recipe_is_printed_or_written(tmp_path: Path) -> None:
    options = [*PLAN, "--engine", "vllm", "--format", "fp8", "--tp", "4"]
    printed = run(app, [*options, "--recipe", "shell"]).output
    assert "# ---- serve.sh" in printed
    assert "nvidia/Llama-3.3-70B-Instruct-FP8" in printed
    assert "--max-model-len 131072" in printed
    assert "--max-num-seqs 16" in printed
    assert run(app, [*options, "--recipe", "shell", "--output", str(tmp_path)]).exit_code == 0
    script = tmp_path / "serve.sh"
    assert script.stat().st_mode & 0o100
    files = json.loads(run(app, [*options, "--recipe", "shell", "--json"]).output)["recipe"]
    assert files == {"serve.sh": script.read_text()}


@pytest.mark.usefixtures("predictor")
def test_a_format_without_a_checkpoint_is_made_first() -> None:
    options = ["plan", "Qwen2.5-32B", "--machine", "2xH100-SXM", "--format", "fp8", "--json"]
    for engine in ("vllm", "sglang", "phalanx", "trtllm"):
        told = json.loads(run(app, [*options, "--engine", engine]).output)
        assert "./Qwen2.5-32B-Instruct-FP8" in told["command"]
        made = ["phalanx", "quantize", "Qwen/Qwen2.5-32B-Instruct", "--output", "./Qwen2.5-32B-Instruct-FP8"]
        assert told["prepare"][:5] == ([] if engine == "trtllm" else made)


@pytest.mark.usefixtures("predictor")
def test_what_does_not_fit_ends_with_an_error_and_what_would_do() -> None:
    result = run(app, ["plan", "Llama-3.3-70B", "--machine", "1xRTX4090", "--engine", "vllm"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "does not fit 1xRTX4090: the nearest" in result.output
    assert "RTX4090 holds it at" in result.output
    answer = run(app, ["plan", "DeepSeek-V3", "--machine", "2xRTX4090", "--json"])
    assert json.loads(answer.output)["best"] is None


@pytest.mark.usefixtures("predictor")
def test_ranks_on_several_machines_are_sent_to_ray() -> None:
    spark = ["plan", "gpt-oss-120b", "--machine", "2xDGX-Spark", "--engine", "vllm", "--tp", "2"]
    assert "--recipe ray has the files" in run(app, spark).output
    assert "ray start --head" in run(app, [*spark, "--recipe", "ray"]).output


@pytest.mark.usefixtures("predictor")
def test_traffic_by_rate_trace_and_shared_prefix(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,900,80\n1,500,60\n")
    by_trace = json.loads(run(app, [*PLAN, "--trace", str(trace), "--json"]).output)
    assert by_trace["workload"]["trace_requests"] == 2
    assert by_trace["best"]["max_sequences"] == by_trace["best"]["kv_tokens"] // 980
    told = [*PLAN, "--rate", "2.5", "--shared-prefix", "512", "--agents", "4", "--json"]
    workload = json.loads(run(app, told).output)["workload"]
    assert (workload["rate"], workload["shared_prefix"], workload["agents"]) == (2.5, 512, 4)


@pytest.mark.usefixtures("predictor")
@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"MODEL": "Lama-3.3-70B"}, "Llama-3.3-70B"),
        ({"--machine": "4xH1000-SXM"}, "H100-SXM"),
        ({"--machine": "0xH100-SXM"}, "such as 1xH100-SXM"),
        ({"--machine": "2xH100-SXM+2xMI300X"}, "such as 2xH100-SXM"),
        ({"--machine": "+"}, "4xH100-SXM"),
        ({"--isl": "-5"}, "at least 1"),
        ({"--osl": "0"}, "at least 1"),
        ({"--concurrency": "-1"}, "at least 1"),
        ({"--rate": "-2"}, "above 0"),
        ({"--spread": "1.5"}, "[0, 1)"),
        ({"--requests": "0"}, "at least 1"),
        ({"--shared-prefix": "2000"}, "at most 1024"),
        ({"--slo": "tpott:50"}, "Did you mean tpot"),
        ({"--engine": "vlm"}, "Did you mean vllm"),
        ({"--format": "fp88"}, "Did you mean fp8"),
        ({"--kv-format": "fp9"}, "Did you mean fp8"),
        ({"--tp": "16"}, "Use 1 to 8"),
        ({"--recipe": "k9s"}, "Did you mean k8s"),
        ({"--trace": "nowhere.csv"}, "CSV or JSON-lines"),
        ({"--years": "0"}, "such as"),
        ({"--machine": ""}, "phalanx plan Llama-3.3-70B --machine 4xH100-SXM"),
    ],
    ids=lambda value: " ".join(f"{key} {text}" for key, text in value.items()) if isinstance(value, dict) else None,
)
def test_bad_input_is_answered_with_the_nearest_valid_choice(options: dict[str, str], nearest: str) -> None:
    told = {"--machine": "8xH100-SXM"} | options
    model = told.pop("MODEL", "Llama-3.3-70B")
    words = [word for option in told.items() for word in option]
    result = run(app, ["plan", model, *words])
    assert result.exit_code == 1, result.output
    assert nearest in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, "The configuration has no num_attention_heads"),
        ({"model_type": "llamma"}, "The nearest is llama"),
        ({"num_key_value_heads": 7}, "do not share 7 KV heads"),
    ],
)
def test_a_bad_configuration_is_named(change: dict[str, object], words: str, tmp_path: Path) -> None:
    config = dict(catalog.entries()["Llama-3.1-8B"].config) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(app, ["plan", str(tmp_path), "--machine", "1xH100-SXM"])
    assert result.exit_code == 1
    assert words in result.output.replace("\n", " ")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_whole_plan_takes_little_memory() -> None:
    """8 GPUs, every TP, four engines, two formats, 256 requests, with the calibrated predictor.

    The peak is the kernel's for this program; `getrusage` would count the memory of the process that started it.
    """
    script = (
        "import sys; sys.argv[1:] = sys.argv[2:]; from phalanx.cli import app\n"
        "try: app()\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    told = ["plan", "Llama-3.3-70B", "--machine", "8xH100-SXM", "--requests", "256", "--format", "bf16,fp8", "--json"]
    done = subprocess.run([sys.executable, "-c", script, "-", *told], capture_output=True, text=True, check=True)
    answer, kibibytes = done.stdout.splitlines()
    assert int(kibibytes) < 300 * 1024
    candidates = json.loads(answer)["candidates"]
    assert {each["engine"] for each in candidates} == {"phalanx", "vllm", "sglang", "trtllm"}
    for each in candidates:
        for name in ("ttft_ms", "tpot_ms", "tokens_per_s"):
            assert 0 < each[name]["low"] < each[name]["mid"] < each[name]["high"] < 1e6


def test_help_loads_no_planner_and_planning_no_torch() -> None:
    script = (
        "import sys; import phalanx.cli; loaded = set(sys.modules); "
        "assert not any(name.startswith(('phalanx.plan', 'phalanx.cost', 'phalanx.spec')) for name in loaded), loaded; "
        "import phalanx.plan.ask; assert not {'torch', 'transformers', 'huggingface_hub', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_a_file_of_measurements_is_evaluated_and_rows_without_prediction_are_named(tmp_path: Path) -> None:
    file, picture = tmp_path / "measured.csv", tmp_path / "errors.png"
    told = "source,measured,engine,version,gpu,tp,ep,model,precision,kv_dtype,isl,osl,concurrency"
    columns = f"{told},ttft_ms,tpot_ms,length_rule"
    row = "made up,2026-11-15,vllm,0.18.0,H100 SXM,4,1,{},fp8,,1024,256,8,200,12,fixed"
    rows = [row.format(model) for model in ("nvidia/Llama-3.3-70B-Instruct-FP8", "no-such-model")]
    file.write_text("\n".join([columns, *rows, ""]))
    result = run(app, ["plan", "--evaluate", str(file), "--json", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    overall = json.loads(result.stdout)["overall"]
    assert (overall["rows"], overall["predicted"]) == (2, 1)
    assert overall["tpot"]["median_ape"] >= 0
    assert "measured.csv, line 3 is not predicted" in result.stderr
    assert "such-model" in result.stderr
    assert [row["line"] for row in json.loads(result.stdout)["unpredicted"]] == [3]
    file.write_text("\n".join([columns, *rows, *[row.format("nobody/nothing")] * 10, ""]))
    many = run(app, ["plan", "--evaluate", str(file)]).stderr
    assert "lines 4, 5, 6, 7, 8, 9, 10, 11 and 2 more are not predicted" in many
    assert "11 of 12 rows left out" in many
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "H100" in run(app, ["plan", "--evaluate", str(file)]).stdout
