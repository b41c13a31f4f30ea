"""The table of folders in docs/engine.md is the contract that import-linter holds."""

from __future__ import annotations

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
