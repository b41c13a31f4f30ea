"""Builds the kernels that stream states for Hopper, which needs no GPU. Run by `test_delta_kernels.py`."""

from __future__ import annotations

from benchmarks.kernels import HOPPER, Builder, streamed_deltas, streamed_drafts, streamed_narrow

from phalanx.kernels.gpu.delta_stream import TOGETHER
from phalanx.kernels.gpu.stream import SHARED_BYTES, SYSTEM_BYTES


def main() -> None:
    """In FP8, bf16 and float32, with three lengths of what is kept beside a state, and with states in bf16."""
    builder = Builder(HOPPER)
    with builder.in_place_of_launches():
        for case in (*list(streamed_deltas())[::4], *list(streamed_drafts())[::4], *streamed_narrow()):
            case()
    assert len(builder.built) == 8
    assert not builder.wrong, builder.wrong
    assert all(TOGETHER * (built.shared + SYSTEM_BYTES) <= SHARED_BYTES for built in builder.built)


if __name__ == "__main__":
    main()
