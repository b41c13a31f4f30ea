"""`phalanx doctor` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.doctor.facts import Measured
from tests.doctor.build_machines import FOLDER, hgx

gather = pytest.importorskip("phalanx.doctor.gather")


def doctor(*arguments: str | Path, width: int = 100) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": str(width)})


def recorded(name: str) -> list[str]:
    return ["--facts", str(FOLDER / f"{name}.json")]


@pytest.mark.parametrize(
    ("name", "status", "last"),
    [
        ("hgx_healthy", 0, "Healthy"),
        ("throttled", 0, "Serves, but not as well as it could"),
        ("mig_on", 1, "Not fit to serve"),
    ],
)
def test_the_exit_code_says_whether_there_are_errors(name: str, status: int, last: str) -> None:
    result = doctor(*recorded(name))
    assert result.exit_code == status, result.output
    assert result.output.splitlines()[-1].startswith(last)


def test_a_deployment_adds_its_checks() -> None:
    result = doctor(*recorded("hgx_healthy"), "--model", "Qwen2.5-72B", "--format", "fp8", "--tp", "4", "--all")
    assert result.exit_code == 0, result.output
    assert "Other engines refuse this TP degree" in result.output
    too_many = doctor(*recorded("hgx_healthy"), "--tp", "16")
    assert too_many.exit_code == 1
    assert "TP=16, 8 GPUs" in too_many.output


def test_several_machines_are_judged_together() -> None:
    both = [*recorded("spark_healthy"), *recorded("spark_wrong_subnet")]
    result = doctor(*both, "--json")
    record = json.loads(result.output)
    assert [each["machine"] for each in record["machines"]] == ["spark-1", "spark-2", "all machines"]
    assert "subnets" in {finding["code"] for finding in record["machines"][2]["findings"]}
    assert doctor(*both, "--tp", "2").exit_code == 0
    assert "Ranks on other machines" not in doctor(*both, "--tp", "2").output


def test_this_machine_is_read_recorded_and_judged_again(tmp_path: Path) -> None:
    file = tmp_path / "me.json"
    first = doctor("--record", file, "--json")
    assert first.exit_code in (0, 1), first.output
    again = json.loads(doctor("--facts", file, "--json").output)
    assert again["machines"] == json.loads(first.output)["machines"]


def test_a_machine_without_anything_of_nvidias_is_useful_and_exits_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.doctor.facts import Facts, Software, System

    unread = ("NVML cannot be asked: NVML Shared Library Not Found.", "nvidia-smi is not installed.")
    laptop = Facts("", System("laptop", cores=8, available_bytes=12 * 2**30), Software("3.12", "0.1"), unread=unread)
    monkeypatch.setattr(gather, "gather", lambda peers, venv: laptop)
    result = doctor()
    assert result.exit_code == 0, result.output
    assert "models run on the processor" in result.output
    assert "Not everything" not in result.output


def test_what_was_measured_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = pytest.importorskip("phalanx.doctor.measure")
    monkeypatch.setattr(gather, "gather", lambda peers, venv: hgx())
    monkeypatch.setattr(measure, "measure", lambda facts, progress: Measured(problem="rank 3 timed out"))
    result = doctor("--measure")
    assert result.exit_code == 1
    assert "A collective did not end" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--facts", "nowhere.json"], "nowhere.json"),
        (["--facts", "FILE", "--measure"], "--facts judges what was recorded"),
        (["--save-calibration", "x.json"], "Add --measure"),
        (["--facts", "FILE", "--model", "Lama-3"], "Did you mean"),
        (["--facts", "FILE", "--machine", "4xH1000"], "H100-SXM"),
        (["--facts", "FILE", "--model", "Qwen3-4B", "--format", "fp9"], "fp8"),
        (["--url", "ftp://here"], "no address"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(arguments: list[str], words: str) -> None:
    result = doctor(*(str(FOLDER / "hgx_healthy.json") if word == "FILE" else word for word in arguments))
    assert result.exit_code == 1
    assert words in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_neither_help_nor_judging_imports_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from phalanx.cli import app; import phalanx.doctor.report; "
        "from phalanx.doctor.checks import judge; from phalanx.doctor.gather import read_facts; "
        f"judge(read_facts(Path({str(FOLDER / 'hgx_healthy.json')!r}))); "
        "assert not {'torch', 'transformers', 'numpy', 'zmq'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
