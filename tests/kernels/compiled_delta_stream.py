"""Builds the kernel that streams states for Hopper, which needs no GPU. Run by `test_delta_kernels.py`."""

from __future__ import annotations

from benchmarks.kernels import HOPPER, Builder, streamed_deltas

from phalanx.kernels.gpu.delta_stream import WAY
from phalanx.kernels.gpu.stream import SHARED_BYTES, SYSTEM_BYTES


def main() -> None:
    """In FP8, bf16 and float32, with three lengths of what is kept beside a state."""
    builder = Builder(HOPPER)
    with builder.in_place_of_launches():
        for case in list(streamed_deltas())[::4]:
            case()
    assert len(builder.built) == 3
    assert not builder.wrong, builder.wrong
    assert all(WAY.together * (built.shared + SYSTEM_BYTES) <= SHARED_BYTES for built in builder.built)


if __name__ == "__main__":
    main()
