"""A group runs in one worker, with the pytest and the xdist that are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

MARKED = """
import pytest
pytestmark = pytest.mark.xdist_group("marked")
@pytest.mark.parametrize("number", range(4))
def test_it(number): pass
"""
FILE = """
import pytest
@pytest.mark.parametrize("family", ["a", "b", "a@c", "d"])
def test_it(family): pass
"""


def test_a_group_runs_in_one_worker(tmp_path: Path) -> None:
    files = {"test_a.py": MARKED, "test_b.py": FILE, "test_c.py": FILE, "test_d.py": MARKED, "web/test_e.py": FILE}
    files["web/test_f.py"] = FILE
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    words = ("-v", "-p", "tests.groups", "-p", "no:schemathesis", "-p", "no:hypothesispytest", "-c", os.devnull)
    command = [sys.executable, "-m", "pytest", *words, "-n", "2", "--dist", "loadgroup", "--rootdir", str(tmp_path)]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    variables = {name: value for name, value in variables.items() if not name.startswith("PYTEST_")}
    answer = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    ran = defaultdict(set)
    for worker, name in re.findall(r"\[(gw\d)\].* PASSED (\S+?\.py)", answer.stdout):
        ran[{"test_a.py": "marked", "test_d.py": "marked"}.get(name, name.split("/")[0])].add(worker)
    assert set(ran) == {"marked", "test_b.py", "test_c.py", "web"}
    assert all(len(workers) == 1 for workers in ran.values()), ran
    assert set.union(*ran.values()) == {"gw0", "gw1"}
