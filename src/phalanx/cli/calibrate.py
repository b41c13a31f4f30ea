"""`phalanx calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.shared import Dtype, KvCacheDtype, LoadFormat, StateDtype, Tp, told_errors


def calibrate(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="What to time: models that you serve; names of the catalog have random weights."),
    ] = None,
    tp: Tp = 1,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    state_dtype: StateDtype = "auto",
    load_format: LoadFormat = "auto",
    cases: Annotated[
        str | None, typer.Option(help="BATCHxINPUTxOUTPUT, several with commas. Default: 12 from 1x128 to 256x128.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write the profile. Default: where plan, Live and lab look for it.")
    ] = None,
) -> None:
    """Time Phalanx's own steps on this GPU, so that plan, Live and lab go by what it does here."""
    with told_errors():
        from rich.console import Console

        from phalanx.bench.calibrate import calibration_gpu, default_cases, measure_steps
        from phalanx.bench.timing import FixedBatch
        from phalanx.cost.fitted import own_file, write_fitted
        from phalanx.plan.own_profile import fit_profile, profile_table
        from phalanx.runtime.config import EngineConfig

        console, measured = Console(), []
        asked: list[str | None] = [*models] if models else [None]
        wanted = [FixedBatch.parse(case) for case in cases.split(",")] if cases else default_cases()
        with console.status("Looking") as status:
            for model in asked:
                config = EngineConfig(
                    model=model,
                    tp=tp,
                    dtype=dtype,
                    kv_cache_dtype=kv_cache_dtype,
                    state_dtype=state_dtype,
                    load_format=load_format,
                )
                gpu = calibration_gpu(config)
                measured += measure_steps(config, gpu, wanted, status.update)
            status.update("Fitting")
            fitted = fit_profile(measured)
        console.print(profile_table(measured, fitted))
        written = output or own_file(gpu.name)
        write_fitted(fitted, written)
        console.print(f"Written to {written}", highlight=False)
