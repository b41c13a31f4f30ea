"""`phalanx gpus`."""

from __future__ import annotations

import json
from typing import Any

from phalanx.cli.shared import AsJson


def gpus(as_json: AsJson = False) -> None:
    """List the accelerators that plans are made for: memory, bandwidth, TFLOP/s by format, rent, engines."""
    from rich.console import Console
    from rich.table import Table

    rows = _accelerators()
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("name", "GiB", "GB/s", "bf16", "fp8", "fp4", "$/h", "engines", box=None, pad_edge=False)
    for row in rows:
        peaks = (f"{row['tflops'][name]:,.0f}" if name in row["tflops"] else "-" for name in ("bf16", "fp8", "fp4"))
        rent = "-" if row["rent_usd_h"] is None else f"{row['rent_usd_h']:.2f}"
        sizes = f"{row['memory_gib']:.0f}", f"{row['bandwidth_gbs']:,.0f}"
        table.add_row(row["name"], *sizes, *peaks, rent, ", ".join(row["engines"]))
    Console(highlight=False).print(table)


def _accelerators() -> list[dict[str, Any]]:
    from phalanx.plan.engines import ENGINES, GIB
    from phalanx.plan.support import formats_on
    from phalanx.spec.machine import gpus as known

    return [
        {
            "name": gpu.name,
            "aliases": list(gpu.aliases),
            "vendor": gpu.vendor,
            "architecture": gpu.architecture,
            "memory_gib": gpu.memory_bytes / GIB,
            "bandwidth_gbs": gpu.bandwidth / 1e9,
            "tflops": {name: peak / 1e12 for name, peak in gpu.peaks.items()},
            "rent_usd_h": gpu.price.rent[1] if gpu.price.rent else None,
            "engines": [name for name in ENGINES if formats_on(name, gpu)],
        }
        for gpu in known()
    ]
