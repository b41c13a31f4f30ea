"""A family is known by name in its own file and nowhere else: all others read what its file says of it."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx
from phalanx.models.registry import families

PACKAGE = Path(phalanx.__file__).parent
OTHER_MEANINGS = {
    ("server/parsers/__init__.py", "qwen3"): "a parser",
    ("text/tokenizer.py", "qwen2"): "a way to split text before it is tokenised",
}


def named_families(source: str) -> set[str]:
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {name for name in families() if name in strings}


def test_no_family_is_named_outside_of_models() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if "models" not in path.relative_to(PACKAGE).parts
        for name in named_families(path.read_text(encoding="utf-8"))
    }
    assert found == set(OTHER_MEANINGS)


def test_a_name_would_be_found() -> None:
    assert named_families('if spec.model_type in ("gpt_oss", "other"):\n    pass') == {"gpt_oss"}
