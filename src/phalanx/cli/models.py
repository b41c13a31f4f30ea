"""`phalanx models`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from phalanx.cli.shared import AsJson, told_errors


def models(
    local: Annotated[bool, typer.Option("--local", help="List the models in the local cache instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the families of models: which are served, which are only planned for, and why."""
    from rich.console import Console
    from rich.table import Table

    if local:
        _tell_local(as_json)
        return
    rows = _families()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("model_type", "served", "in the catalog", box=None, pad_edge=False)
    for row in rows:
        served = "yes" if row["served"] else f"no: {row['why_not']}"
        table.add_row(row["model_type"], served, ", ".join(row["models"]))
    Console(highlight=False).print(table)


def _tell_local(as_json: bool) -> None:
    """What has been pulled, and whether it can be served."""
    from rich.console import Console
    from rich.table import Table

    with told_errors():
        from phalanx.models.registry import families
        from phalanx.weights.hub import local_models

        known = families()
        found = local_models()
    rows: list[dict[str, Any]] = [
        {
            "id": model.id,
            "bytes": model.size,
            "model_type": model.model_type,
            "served": model.model_type in known and known[model.model_type].planned_only is None,
            "folder": str(model.folder),
        }
        for model in found
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("model", "GB", "model_type", "served", box=None, pad_edge=False)
    for row in rows:
        served = "yes" if row["served"] else "no"
        table.add_row(row["id"], f"{row['bytes'] / 1e9:.2f}", row["model_type"] or "-", served)
    Console(highlight=False).print(table if rows else "No model has been pulled yet: phalanx pull MODEL")


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
