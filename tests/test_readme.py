"""What the README shows, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    """As a script of a user's own, in a folder of its own."""
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    script = tmp_path / "example.py"
    script.write_text("\n".join(examples), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
