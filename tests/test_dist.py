"""What `make dist` builds: all that the package needs, and nothing else."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from phalanx import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, timeout=240)
    return folder


def shipped() -> set[str]:
    """Every file of the package, by its path in it."""
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT / "src")) for path in files if ".egg-info" not in str(path)}


def test_the_wheel_has_every_file_of_the_package_and_says_what_it_needs(built: Path) -> None:
    with zipfile.ZipFile(built / f"phalanx-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        about = f"phalanx-{__version__}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{about}/METADATA"))
        entry = wheel.read(f"{about}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(about)} == shipped()
    assert (metadata["Name"], metadata["Version"]) == ("phalanx", __version__)
    assert {"serve", "cluster", "studio", "otel", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    plain = [need for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert sorted(need.partition(">")[0] for need in plain) == ["msgspec", "nvidia-ml-py", "rich", "typer"]
    assert "phalanx = phalanx.cli:app" in entry


def test_the_wheel_runs_from_where_it_is_unpacked(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built / f"phalanx-{__version__}-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import phalanx; print(phalanx.__file__)\n" + (
        "from phalanx.cli import app; app(['plan', 'Llama-3.3-70B', '--machine', '4xH100-SXM', '--recipe', 'k8s'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.startswith(str(tmp_path))
    assert "PodDisruptionBudget" in done.stdout


def test_the_source_archive_builds_the_same(built: Path) -> None:
    with tarfile.open(built / f"phalanx-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in shipped()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert not any(name.startswith(("tests/", "web/", "benchmarks/")) for name in names)
