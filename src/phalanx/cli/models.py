"""`phalanx models`."""

from __future__ import annotations

import json
from typing import Any

from phalanx.cli.shared import AsJson


def models(as_json: AsJson = False) -> None:
    """List the families of models: which are served, which are only planned for, and why."""
    from rich.console import Console
    from rich.table import Table

    rows = _families()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("model_type", "served", "in the catalog", box=None, pad_edge=False)
    for row in rows:
        served = "yes" if row["served"] else f"no: {row['why_not']}"
        table.add_row(row["model_type"], served, ", ".join(row["models"]))
    Console(highlight=False).print(table)


def _families() -> list[dict[str, Any]]:
    from phalanx.models import catalog
    from phalanx.models.registry import families

    known: dict[str, list[str]] = {name: [] for name in families()}
    for entry in catalog.entries().values():
        known[entry.spec.model_type].append(entry.name)
    return [
        {
            "model_type": name,
            "served": family.planned_only is None,
            "why_not": family.planned_only,
            "models": known[name],
        }
        for name, family in families().items()
    ]
