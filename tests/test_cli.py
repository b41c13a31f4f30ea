"""The command line as a person meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx import __version__
from phalanx.bench import timing
from phalanx.cli import app
from phalanx.engine.core import Engine
from phalanx.models.registry import families, served

run = CliRunner().invoke


def test_version_and_help() -> None:
    assert run(app, ["--version"]).output.strip() == f"phalanx {__version__}"
    assert "generate" in run(app, ["--help"]).output


def test_what_serves_is_not_needed_to_plan(tmp_path: Path) -> None:
    """Nothing of `phalanx[serve]` is there: neither help nor a plan with its recipe asks for any of it."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    serve = [re.split(r"[^\w-]", line)[0] for line in project["optional-dependencies"]["serve"]]
    missing = {name.replace("-", "_") for name in serve} | {"zmq"}
    plan = ["plan", "Llama-3.3-70B", "--machine", "4xH100-SXM", "--recipe", "k8s", "--output", str(tmp_path / "recipe")]
    script = f"""
import sys
import tomllib
sys.modules.update(dict.fromkeys({sorted(missing)}))
from phalanx.cli import app
import phalanx.spec, phalanx.engine.core, phalanx.engine.modelled
app({plan}, standalone_mode=False)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, stdout=subprocess.DEVNULL)
    assert (tmp_path / "recipe/kubernetes.yaml").stat().st_size
    assert missing > {"torch", "safetensors"}


def test_models_lists_every_family_and_says_why_one_is_only_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known = families()
    listed = json.loads(run(app, ["models", "--json"]).output)
    assert [row["model_type"] for row in listed] == list(known)
    assert all(row["served"] == (row["why_not"] is None) for row in listed)
    assert {"llama", "qwen3_5", "deepseek_v3", "gpt_oss"} <= {row["model_type"] for row in listed if row["served"]}
    assert "Qwen3-8B" in next(row["models"] for row in listed if row["model_type"] == "qwen3")
    planned = known["llama"]._replace(planned_only="nobody has written its mixer.")
    monkeypatch.setitem(known, "llama", planned)
    row = next(row for row in json.loads(run(app, ["models", "--json"]).output) if row["model_type"] == "llama")
    assert (row["served"], row["why_not"]) == (False, planned.planned_only)
    monkeypatch.setenv("COLUMNS", "400")
    lines = run(app, ["models"]).output.splitlines()
    told = {words[0]: " ".join(words[1:]) for line in lines[1:] if (words := line.split())}
    assert told.keys() == known.keys()
    assert told["llama"].startswith("no: nobody has written its mixer.")
    assert all(told[name].startswith("yes") for name in served())


def test_generate_prints_the_answer(tiny_llama: Path) -> None:
    result = run(app, ["generate", str(tiny_llama), "--prompt-ids", "1,2,3", "--max-tokens", "5", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert len(answer["token_ids"]) == 5
    assert answer["prompt_tokens"] == 3
    assert answer["finish_reason"] == "length"


def test_generate_over_two_ranks_gives_the_same(tiny_llama: Path) -> None:
    command = ["generate", str(tiny_llama), "--prompt-ids", "1,2,3", "--max-tokens", "5", "--json"]
    one, two = run(app, command), run(app, [*command, "--tp", "2"])
    assert json.loads(one.output) == json.loads(two.output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--prompt", "x", "--chat", "y"], "exactly one of"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is neither a folder"),
        (["generate", "MODEL", "--prompt", "x"], "Give token ids"),
        (["generate", "MODEL", "--prompt-ids", "1,b"], "Write token ids as 1,2,3"),
        (["generate", "MODEL", "--prompt-ids", "1", "--tp", "10"], "Use TP <= 9"),
        (["generate", "MODEL", "--prompt-ids", "1", "--top-p", "0"], "top_p is 0.0"),
        (["bench", "offline", "MODEL", "--cases", "8x16"], "Write BATCHxINPUTxOUTPUT"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(tiny_llama: Path, arguments: list[str], words: str) -> None:
    result = run(app, [str(tiny_llama) if word == "MODEL" else word for word in arguments])
    assert result.exit_code == 1
    assert words in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("unsteady_figures")
def test_bench_offline_prints_a_table_and_writes_json(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is run, but a token is said to take 0.1 s: a machine that pauses changes no figure."""
    time_requests = timing.time_requests

    def timed(engine: Engine, lengths: list[tuple[int, int]], *how: Any, **options: Any) -> timing.Timing:
        told = time_requests(engine, lengths, *how, **options)
        return replace(told, first=0.1, decode=0.1 * told.steps, whole=0.1 * lengths[0][1])

    monkeypatch.setattr(timing, "time_requests", timed)
    output = tmp_path / "bench.json"
    cases = "1x16x64,3x8x48"
    result = run(app, ["bench", "offline", str(tiny_llama), "--cases", cases, "--repeats", "1", "--json", str(output)])
    assert result.exit_code == 0, result.output
    assert "of limit" in result.output
    record = json.loads(output.read_text())
    assert [row["case"] for row in record["results"]] == cases.split(",")
    for row, prompts, batch in zip(record["results"], (16, 24), (1, 3), strict=True):
        assert row["prefill_tok_s"] == pytest.approx(prompts / 0.1)
        assert row["tpot_ms"] == pytest.approx(100)
        assert [row["decode_tok_s"], row["tok_s"]] == pytest.approx([batch / 0.1] * 2)
        assert 0 < row["decode_share"] < 1
