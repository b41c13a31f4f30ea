"""Flagship models by any of their names; what is unknown is answered with the nearest."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.errors import ModelError
from phalanx.models import catalog


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # as the makers publish them, in billions
        ("Llama-3.1-8B", 8.03, 8.03),
        ("Llama-3.3-70B", 70.6, 70.6),
        ("Llama-3.1-405B", 405.9, 405.9),
        ("Qwen2.5-7B", 7.61, 7.61),
        ("Qwen2.5-32B", 32.8, 32.8),
        ("Qwen2.5-72B", 72.7, 72.7),
        ("Qwen3-0.6B", 0.596, 0.596),
        ("Qwen3-4B", 4.02, 4.02),
        ("Qwen3-8B", 8.19, 8.19),
        ("Qwen3-14B", 14.8, 14.8),
        ("Qwen3-32B", 32.8, 32.8),
        ("Qwen3-30B-A3B", 30.5, 3.35),
        ("Qwen3-235B-A22B", 235.1, 22.2),
        ("Qwen3-Coder-480B-A35B", 480.2, 35.5),
        ("Qwen3-Next-80B-A3B", 79.67, 3.88),
        ("Qwen3.5-27B", 26.9, 26.9),
        ("Qwen3.5-35B-A3B", 34.66, 3.46),
        ("Qwen3.5-122B-A10B", 122.1, 9.77),
        ("Qwen3.5-397B-A17B", 396.4, 17.35),
        ("gpt-oss-120b", 116.8, 5.71),
        ("gpt-oss-20b", 20.9, 4.19),
        ("DeepSeek-V3", 671.0, 37.6),
        ("DeepSeek-R1", 671.0, 37.6),
        ("DeepSeek-V3.2", 671.9, 38.4),
        ("DeepSeek-V4-Flash", 284.33, 13.80),
        ("DeepSeek-V4-Pro", 1573.0, 49.78),
        ("Kimi-K2", 1026.4, 32.9),
        ("Kimi-K2.5", 1026.4, 32.9),
        ("GLM-5", 743.9, 41.8),
        ("GLM-5.2", 743.4, 41.3),
        ("GLM-4.6", 352.8, 33.6),
        ("GLM-4.5-Air", 106.9, 13.4),
        ("GLM-4.7-Flash", 29.9, 3.9),
        ("MiniMax-M2", 228.7, 11.0),
        ("Llama-4-Maverick", 400.7, 17.2),
        ("Llama-4-Scout", 107.8, 17.2),
        ("Mixtral-8x7B", 46.7, 12.9),
        ("Mixtral-8x22B", 140.6, 39.2),
        ("Mistral-Small-24B", 23.6, 23.6),
        ("Gemma-3-27B", 27.0, 27.0),
        ("SmolLM2-135M", 0.1345, 0.1345),
    ],
)
def test_parameters_as_published(name: str, total: float, active: float) -> None:
    spec = catalog.model(name)
    assert spec.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert spec.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_every_model_of_the_catalog_has_a_published_count_above() -> None:
    marks = test_parameters_as_published.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in marks[0].args[1]} == set(catalog.entries())


@pytest.mark.parametrize(
    ("name", "entry", "number_format"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B", "bf16"),
        ("llama-3.3-70b", "Llama-3.3-70B", "bf16"),
        ("Llama-3.1-70B-Instruct", "Llama-3.3-70B", "bf16"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B", "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "Llama-3.3-70B", "fp8-channel"),
        ("Qwen/Qwen3-235B-A22B-FP8", "Qwen3-235B-A22B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen2.5-72B", "awq"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "Qwen2.5-72B", "gptq"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-R1", "fp8"),
        ("moonshotai/Kimi-K2.5", "Kimi-K2.5", "int4"),
        ("MiniMaxAI/MiniMax-M2.5", "MiniMax-M2", "fp8"),
        ("zhipuai/GLM-5", "GLM-5", "bf16"),
        ("zai-org/GLM-5.2-FP8", "GLM-5.2", "fp8"),
        ("deepseek-ai/DeepSeek-V4-Flash", "DeepSeek-V4-Flash", "mxfp4"),
        ("deepseek-v4-pro", "DeepSeek-V4-Pro", "mxfp4"),
        ("google/gemma-3-27b-it", "Gemma-3-27B", "bf16"),
        ("gpt oss 20b", "gpt-oss-20b", "mxfp4"),
    ],
)
def test_a_model_goes_by_many_names(name: str, entry: str, number_format: str) -> None:
    found = catalog.find(name)
    assert found is not None
    assert found[0].name == entry
    assert catalog.model(name).number_format == number_format


@pytest.mark.parametrize(
    ("name", "machine", "tp"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", "8xH200-SXM", 8),
        ("deepseek-ai/DeepSeek-V4-Pro", "8xB200", 8),
        ("zai-org/GLM-5.2", "8xB300", 8),
        ("MiniMaxAI/MiniMax-M2.5", "4xH200-SXM", 4),
        ("google/gemma-3-27b-it", "1xH100-SXM", 1),
    ],
)
def test_the_planner_knows_it_by_its_id(name: str, machine: str, tp: int) -> None:
    asked = ["plan", name, "--machine", machine, "--tp", str(tp), "--engine", "vllm", "--requests", "20", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["best"]["tp"] == tp
    assert answer["model"]["parameters"] == catalog.model(name).parameters


def test_a_checkpoint_of_a_format_is_named_where_there_is_one() -> None:
    llama = catalog.entries()["Llama-3.3-70B"]
    assert llama.checkpoint("bf16") == "meta-llama/Llama-3.3-70B-Instruct"
    assert llama.checkpoint("fp8", "fp8-channel") == "nvidia/Llama-3.3-70B-Instruct-FP8"
    assert llama.checkpoint("awq") is None


def test_a_config_and_its_folder_are_read(tmp_path: Path) -> None:
    config = dict(catalog.entries()["Mixtral-8x7B"].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert catalog.model(str(tmp_path)) == catalog.model("Mixtral-8x7B")
    assert catalog.model(str(tmp_path / "config.json")) == catalog.model("Mixtral-8x7B")


@pytest.mark.parametrize(
    ("typed", "meant"), [("Lama-3.3-70B", "Llama-3.3-70B"), ("qwen3-32", "Qwen3-32B"), ("DeepSeekV3", "DeepSeek-V3")]
)
def test_a_typo_is_answered_with_the_nearest_name(typed: str, meant: str) -> None:
    with pytest.raises(ModelError) as refused:
        catalog.model(typed)
    assert refused.value.code == "unknown_model"
    assert meant in refused.value.fix.partition("?")[0]


def test_an_id_that_cannot_be_had_is_answered_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError) as refused:
        catalog.model("someone/Llama-3.3-71B")
    assert "huggingface_hub is not installed" in refused.value.found
    assert "Llama-3.3-70B" in refused.value.fix.partition("?")[0]


def test_a_config_from_the_hub_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(catalog.entries()["Qwen3-8B"].config)))
    asked = []

    def download(model_id: str, name: str, local_files_only: bool) -> str:
        asked.append((model_id, name, local_files_only))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for online in (True, False):
        monkeypatch.setattr(catalog, "_hub_answers", lambda address, online=online: online)
        assert catalog.model("someone/else") == catalog.model("Qwen3-8B")
    assert asked == [("someone/else", "config.json", False), ("someone/else", "config.json", True)]


def test_a_hub_that_does_not_answer_is_found_out_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert catalog._hub_answers(address) is False


def test_an_unknown_format_is_answered_with_the_nearest() -> None:
    assert catalog.check_format("fp8") == "fp8"
    with pytest.raises(ModelError, match="Did you mean mxfp4"):
        catalog.check_format("mxfp44")
