"""What the lab found, kept in files: measured on one machine, it may be drawn on another."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import msgspec

from phalanx.bench.lab.experiment import Lab
from phalanx.bench.lab.report import markdown
from phalanx.bench.lab.verdict import verdicts
from phalanx.errors import ConfigError
from phalanx.version import __version__


def write_lab(lab: Lab, folder: Path) -> list[str]:
    """lab.md, lab.json and, where there is matplotlib, lab.png: the names of those written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = find_spec("matplotlib") is not None
    (folder / "lab.md").write_text(markdown(lab, "lab.png" if drawn else None), encoding="utf-8")
    (folder / "lab.json").write_text(json.dumps(_record(lab), indent=1) + "\n")
    if not drawn:
        return ["lab.md", "lab.json"]
    from phalanx.bench.lab.plot import save_plot

    save_plot(lab, folder / "lab.png")
    return ["lab.md", "lab.json", "lab.png"]


def _record(lab: Lab) -> dict[str, object]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "phalanx": __version__, **asdict(lab), "verdicts": verdicts(lab.points, lab.on_gpus)}


def read_lab(path: Path) -> Lab:
    """Of a lab.json."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lab)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            "not_a_lab", f"{path} is no lab.json: {error}", "Give one that phalanx lab has written."
        ) from None
