"""Draws the case in a folder with the Triton kernels, in small stretches; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from phalanx.kernels.gpu import sampling
from tests.kernels.interpreter import make_ready


def main(folder: Path, room: int) -> None:
    make_ready()
    sampling.STRETCH, sampling.CHUNK, sampling.CANDIDATES, sampling.CANDIDATES_AT_ONCE = 256, 16, room, 1024
    case = load_file(folder / "case")
    drawn = sampling.draw(case["scores"], case["table"], torch.arange(len(case["scores"])), case["positions"])
    found = {"drawn": drawn, "likeliest": sampling.likeliest(case["scores"])}
    found["flagged"] = sampling.flag_broken(sampling.likeliest(case["broken"]), case["broken"])
    save_file(found, folder / "found")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
