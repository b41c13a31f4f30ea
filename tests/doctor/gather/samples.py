"""Real outputs lie beside the repository in `shared/notes/samples`; tests go without them where they are not."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "notes" / "samples"


def sample_names() -> list[str]:
    return sorted(path.name for path in FOLDER.glob("*") if path.name != "SOURCES.txt")


def sample(name: str) -> str:
    return (FOLDER / name).read_text()
