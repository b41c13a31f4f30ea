"""The house: the table of folders in docs/engine.md is import-linter's contract, and a name means one thing."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

HOUSE = Path(__file__).parents[1]


def test_the_table_has_the_folders_of_the_contract_from_the_ground_up() -> None:
    contracts = tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    from_the_top = [folder.strip() for layer in layers for folder in layer.split("|")]
    rows = re.findall(r"^\| (`[a-z].*?) \|", (HOUSE / "docs/engine.md").read_text(), re.MULTILINE)
    table = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert table[: len(from_the_top)] == from_the_top[::-1]


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted((HOUSE / "src").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(HOUSE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
