"""Tables without lines."""

from __future__ import annotations

from rich.table import Table


def plain_table(*columns: str) -> Table:
    """The first column is of words, the others of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place == 0 else "right")
    return table
