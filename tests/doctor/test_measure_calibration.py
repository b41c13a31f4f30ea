"""A measurement becomes a calibration file, unless it cannot be trusted or used."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.doctor.facts import AllReduce, Corruption, Facts, Measured, Rate, Software, System
from phalanx.doctor.measure import save_calibration
from phalanx.doctor.measure.calibration import calibrate
from phalanx.spec.calibration import AllReduceTimes, Calibration, CalibrationError, GpuShare

FACTS = Facts("2026-11-15T10:00:00Z", System("box7"), Software("3.11", "0.6", driver="580.1", nccl="2.29.2"))
HOPPER, ADA = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
RATES = (
    Rate(1, HOPPER, 3015.0, 791.2, "bf16", 3350.0, 989.0, 1385.3, 1979.0),
    Rate(0, HOPPER, 2010.0, 494.5, "bf16", 3350.0, 989.0, None, 1979.0),
)
REDUCES = (
    AllReduce(65536, 2, 8.0, 8.2),
    AllReduce(8192, 2, 7.0, 1.2),
    AllReduce(8192, 4, 10.0, 1.2),
    AllReduce(65536, 4, 12.0, 8.2),
)
MEASURED = Measured(RATES, "nccl", REDUCES, 2**20)


def test_shares_and_times_are_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "box7.json"
    saved = save_calibration(MEASURED, FACTS, path)
    assert Calibration.read(path) == saved
    assert (saved.date, saved.machine, saved.host) == ("2026-11-15T10:00:00Z", "2xH100-SXM", "box7")
    assert saved.source == "phalanx doctor --measure (driver 580.1, NCCL 2.29.2)"
    slow, healthy = saved.gpus
    assert slow == GpuShare(0, "H100-SXM", 2010 / 3350, 494.5 / 989)
    assert healthy == GpuShare(1, "H100-SXM", 3015 / 3350, 791.2 / 989, 1385.3 / 1979)
    assert saved.all_reduces == (
        AllReduceTimes(2, (8192, 65536), (7.0, 8.0)),
        AllReduceTimes(4, (8192, 65536), (10.0, 12.0)),
    )


@pytest.mark.parametrize(
    ("measured", "code", "words"),
    [
        (msgspec.structs.replace(MEASURED, corruptions=(Corruption(3, 8192, 0),)), "corrupt_sums", "ranks 3"),
        (msgspec.structs.replace(MEASURED, problem="Rank 1 died."), "not_measured", "Rank 1 died."),
        (Measured((Rate(-1, "A CPU", 20.0, 0.1, "fp32"),), "gloo", REDUCES), "no_datasheet", "gpus.toml"),
        (msgspec.structs.replace(MEASURED, rates=(*RATES, Rate(2, "New", 1.0, 1.0))), "no_datasheet", "gpus.toml"),
        (Measured(), "no_datasheet", "gpus.toml"),
    ],
    ids=["wrong sums", "a rank died", "a CPU", "an unknown GPU beside", "nothing"],
)
def test_what_cannot_be_trusted_or_used_is_refused(measured: Measured, code: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(CalibrationError, match=words) as caught:
        save_calibration(measured, FACTS, path)
    assert caught.value.code == code
    assert not path.exists()


def test_unlike_cards_are_each_held_against_their_own_datasheet() -> None:
    mixed = (RATES[0], Rate(2, ADA, 270.0, 60.0, "bf16", 300.0, 121.0))
    found = calibrate(Measured(mixed), FACTS)
    assert found.machine == "1xH100-SXM+1xL4"
    assert [gpu.bandwidth for gpu in found.gpus] == pytest.approx([0.9, 0.9])
    assert found.all_reduces == ()
