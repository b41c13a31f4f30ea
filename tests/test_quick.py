"""What `make quick` runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import is_needed

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("changed", "test", "slow", "needed"),
    [
        ("src/phalanx/runtime/grammar.py", "runtime/test_grammar.py", True, True),
        ("src/phalanx/runtime/grammar.py", "runtime/test_parity.py", True, False),
        ("src/phalanx/runtime/grammar.py", "runtime/test_sampler.py", False, True),
        ("src/phalanx/runtime/grammar.py", "server/test_keys.py", False, False),
        ("src/phalanx/server/parsers/hermes.py", "server/test_keys.py", False, True),
        ("tests/web/test_live.py", "web/test_live.py", True, True),
        ("tests/web/browser.py", "web/test_live.py", True, False),
        ("tests/web/browser.py", "web/test_planner.py", False, True),
        ("tests/conftest.py", "cost/test_price.py", False, True),
        ("tests/conftest.py", "runtime/test_parity.py", True, False),
        ("tests/test_llm.py", "cost/test_price.py", False, False),
        ("pyproject.toml", "cost/test_price.py", False, True),
        ("docs/testing.md", "cost/test_price.py", False, False),
        ("docs/testing.md", "test_docs.py", False, True),
        ("README.md", "test_llm.py", True, False),
    ],
)
def test_a_change_needs_the_tests_of_its_part(changed: str, test: str, slow: bool, needed: bool) -> None:
    assert is_needed(ROOT / "tests" / test, slow, [ROOT / changed]) == needed
