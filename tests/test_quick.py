"""What `make quick` runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import is_needed, may_be_needed

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("changed", "test", "slow", "needed"),
    [
        ("tests/forked.py", "server/test_faults.py", True, False),
        ("tests/byte_model.py", "cost/test_price.py", False, False),
        ("tests/timeless.py", "server/test_fairness.py", False, True),
        ("src/phalanx/errors.py", "cost/test_price.py", False, False),
        ("src/phalanx/runtime/grammar.py", "runtime/test_grammar.py", True, True),
        ("src/phalanx/runtime/grammar.py", "runtime/test_parity.py", True, False),
        ("src/phalanx/runtime/grammar.py", "runtime/test_sampler.py", False, True),
        ("src/phalanx/runtime/grammar.py", "server/test_keys.py", False, False),
        ("src/phalanx/server/parsers/hermes.py", "server/test_keys.py", False, True),
        ("tests/web/test_live.py", "web/test_live.py", True, True),
        ("tests/web/browser.py", "web/test_live.py", True, False),
        ("tests/web/browser.py", "web/test_planner.py", False, True),
        ("tests/conftest.py", "cost/test_price.py", False, False),
        ("tests/conftest.py", "runtime/test_parity.py", True, False),
        ("tests/test_llm.py", "cost/test_price.py", False, False),
        ("pyproject.toml", "cost/test_price.py", False, False),
        ("docs/testing.md", "cost/test_price.py", False, False),
        ("docs/testing.md", "test_docs.py", False, True),
        ("README.md", "test_llm.py", True, False),
    ],
)
def test_a_change_needs_the_tests_of_its_part(changed: str, test: str, slow: bool, needed: bool) -> None:
    assert is_needed(ROOT / "tests" / test, slow, False, [ROOT / changed]) == needed


@pytest.mark.parametrize(
    ("changed", "needed"),
    [("tests/conftest.py", True), ("pyproject.toml", True), ("tests/forked.py", True), ("docs/testing.md", False)],
)
def test_what_all_stand_on_is_tried_by_the_first_test_of_each_file(changed: str, needed: bool) -> None:
    file = ROOT / "tests/cost/test_price.py"
    assert is_needed(file, False, True, [ROOT / changed]) == needed
    assert may_be_needed(file, [ROOT / changed]) == needed


def test_a_file_with_nothing_to_say_is_not_read() -> None:
    runtime = ROOT / "tests/runtime"
    changed = [ROOT / "src/phalanx/server/keys.py"]
    assert not may_be_needed(runtime / "test_parity.py", changed)
    assert may_be_needed(ROOT / "tests/server/test_keys.py", changed)
    assert may_be_needed(ROOT / "tests/test_llm.py", changed)
