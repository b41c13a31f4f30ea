"""`python -m phalanx.cli`."""

from __future__ import annotations

from phalanx.cli import app

app()
