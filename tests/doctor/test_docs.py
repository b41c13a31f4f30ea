"""docs/doctor.md names every code, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from phalanx.doctor import checks

_ROOT = Path(__file__).parents[2]


def codes_in_source() -> set[str]:
    found = set()
    for file in Path(checks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                assert isinstance(node.args[1], ast.Constant)
                found.add(node.args[1].value)
    return found


def test_every_code_is_in_the_table() -> None:
    table = (_ROOT / "docs" / "doctor.md").read_text().partition("## Codes")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == codes_in_source()
