"""Facts in a file: whole and ours, or refused with the field's name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.doctor.facts import Facts, GpuFacts, GpuPath, NetworkFacts, Nic, NvLink, Software, System
from phalanx.doctor.gather import FactsError, read_facts, write_facts

FACTS = Facts(
    recorded_at="2026-11-15T10:00:00+00:00",
    system=System("box", instructions=("avx2",), xids=(79,)),
    software=Software("3.11.7", "0.1.0"),
    gpus=(GpuFacts(0, "NVIDIA H200", links=(NvLink(0, True, 26.562, 0),), throttle=()), GpuFacts(1, "NVIDIA H200")),
    paths=(GpuPath(0, 1, "nvlink", 18, "ok"),),
    network=NetworkFacts((Nic("eth0", True, addresses=("10.0.0.1/8",)),), {"NCCL_DEBUG": "INFO"}, {"10.0.0.2": False}),
    unread=("NVML said no.",),
)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_facts(path, FACTS)
    assert read_facts(path) == FACTS
    assert [entry.name for entry in tmp_path.iterdir()] == ["facts.json"]


def changed(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "facts.json"
    write_facts(path, FACTS)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda facts: facts.pop("system"), "missing required field `system`"),
        (lambda facts: facts["gpus"][1].pop("name"), r"missing required field `name` - at `\$.gpus\[1\]`"),
        (lambda facts: facts["gpus"][0].update(power_w="hot"), r"Expected `float \| null`, got `str` - at `\$.gpus"),
        (lambda facts: facts["gpus"][0].update(memory=3), r"unknown field `memory` - at `\$.gpus"),
        (lambda facts: facts["paths"][0].update(kind="magic"), r"Invalid enum value 'magic' - at `\$.paths"),
        (lambda facts: facts.update(version=2), "it has version 2, and this Phalanx reads 1"),
        (lambda facts: facts.update(version="new"), r"at `\$.version`"),
        (lambda facts: facts["gpus"][1].update(index=0), r"\$.gpus holds one index twice"),
        (lambda facts: facts["paths"][0].update(b=7), r"\$.paths\[0\] joins GPU 0 and GPU 7"),
        (lambda facts: facts["paths"].append({"a": 1, "b": 0, "kind": "sys"}), r"\$.paths joins the same GPUs twice"),
    ],
)
def test_a_damaged_file_is_refused_by_the_fields_name(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(FactsError, match=reason):
        read_facts(changed(tmp_path, change))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"a": 1}', b"\xff\xfe", b'{"recorded_at": "\xff"}'])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(FactsError, match=r"facts\.json cannot be read as facts"):
        read_facts(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_facts(path, FACTS)
    content = path.read_bytes().rstrip()
    for end in range(len(content) - 1, -1, -1):
        os.truncate(path, end)
        with pytest.raises(FactsError):
            read_facts(path)


def test_no_file_and_no_place_for_one(tmp_path: Path) -> None:
    with pytest.raises(FactsError, match="no such file"):
        read_facts(tmp_path / "none.json")
    with pytest.raises(FactsError, match="cannot be written"):
        write_facts(tmp_path / "none" / "facts.json", FACTS)
