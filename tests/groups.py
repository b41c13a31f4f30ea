"""Groups of tests, each run by one of the workers that share them: what a group has in common is made once.

pytest-xdist 3.8 has groups too (`--dist loadgroup`), but hands them on in names of tests, which pytest 9.2 no longer
lets it change: every test goes where there is room, without a word. So here a worker writes the groups into a file, and
the scheduler reads it.
"""

from __future__ import annotations

import json
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ONE_AT_A_TIME = ("web", "cluster")
"""Folders whose tests share what a machine has once: a browser, namespaces and fixed ports."""
_LONGEST = (*ONE_AT_A_TIME, "server")
_FILE = "groups"
_PLACE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def group_of(item: pytest.Item) -> str:
    """A family's tests share its reference, those of some folders what they run on; else a file is a group."""
    if (marked := item.get_closest_marker("xdist_group")) is not None:
        return marked.args[0]
    family = getattr(item, "callspec", None) and item.callspec.params.get("reference")
    folder = item.path.parent.name
    return family or (folder if folder in ONE_AT_A_TIME else item.location[0])


def longest_first(items: list[pytest.Item]) -> None:
    """So that at the end no worker waits for the other."""

    def rank(item: pytest.Item) -> tuple[bool, int]:
        place = _LONGEST.index(group) if (group := group_of(item)) in _LONGEST else len(_LONGEST)
        return item.get_closest_marker("slow") is None, place

    items.sort(key=rank)


class Groups(LoadScopeScheduling):
    """Deals whole groups, in the order of their first tests."""

    @cached_property
    def _groups(self) -> dict[str, str]:
        return json.loads(Path(self.config.stash[_PLACE].name, _FILE).read_text())

    def _split_scope(self, nodeid: str) -> str:
        return self._groups[nodeid]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where to write."""
    if _PLACE not in node.config.stash:
        node.config.stash[_PLACE] = tempfile.TemporaryDirectory()
    node.workerinput[_FILE] = node.config.stash[_PLACE].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All workers have the same tests: the first one writes for them."""
    longest_first(items)
    told = getattr(config, "workerinput", {})
    if told.get("workerid") == "gw0":
        Path(told[_FILE], _FILE).write_text(json.dumps({item.nodeid: group_of(item) for item in items}))
