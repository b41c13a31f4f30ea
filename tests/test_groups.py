"""Workers are dealt groups of tests (`tests/conftest.py`), and not single ones."""

from __future__ import annotations

import pytest


def test_a_test_goes_with_its_group(request: pytest.FixtureRequest, worker_id: str) -> None:
    """Without groups all would still pass, but each worker would make every server, checkpoint and reference again."""
    if worker_id == "master":
        pytest.skip("one worker has all groups")
    assert request.node.nodeid.endswith("@tests/test_groups.py")
