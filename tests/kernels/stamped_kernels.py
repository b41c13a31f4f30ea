"""Builds kernels with and without a stamp for a Hopper that is not there. Run by tests/trace/test_stamps.py."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.kernels import HOPPER, Builder, routed_with_norm, some, sums

from phalanx.kernels.gpu import rows, stamps

CLOCK, AHEAD = "%globaltimer", "griddepcontrol.wait"
COLLECTIVES = {"_one_shot", "_two_shot", "_one_shot_add_rms_norm", "_gather"}


class Reader(Builder):
    """Keeps what was built last, as PTX."""

    name = ptx = ""

    def build(self, kernel: Any, *args: Any, **options: Any) -> Any:
        made = super().build(kernel, *args, **options)
        self.name, self.ptx = kernel.__name__, made.asm["ptx"]
        return made


def main() -> None:
    reader, place = Reader(HOPPER), torch.zeros(2, dtype=torch.int64)
    with reader.in_place_of_launches():
        norm = lambda: rows.add_rms_norm(some(4, 4096), some(4, 4096), some(4096), 1e-5)  # noqa: E731
        for launch in (norm, routed_with_norm, *sums(False)):
            launch()
            assert CLOCK not in reader.ptx, f"{reader.name} reads the clock for nobody"
            untraced = reader.name
            stamps.want(place)
            launch()
            assert reader.name == untraced
            assert reader.ptx.count(CLOCK) == 1 + (reader.name in COLLECTIVES), reader.name
            assert reader.ptx.index(AHEAD) < reader.ptx.index(CLOCK), f"{reader.name} begins before its turn"
        stamps.want(place)
        stamps.stamp()
        assert reader.ptx.index(AHEAD) < reader.ptx.index(CLOCK)
    assert not reader.wrong


if __name__ == "__main__":
    main()
