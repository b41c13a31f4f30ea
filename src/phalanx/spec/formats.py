"""Number formats: how many bytes a weight takes, its share of the scales included."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """Bits of one weight, and the tile of weights that shares one scale (with its zero point, where there is one).

    A tile of None columns is a whole row. No rank's share may cut a tile, so `unit` is what `Layout` deals by.
    """

    name: str
    bits: int
    tile: tuple[int, int | None] | None = None
    scale_bytes: float = 0.0

    @property
    def unit(self) -> int | None:
        return self.tile[1] if self.tile else None

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales; half a tile at the edge has a whole scale."""
        payload = rows * columns * self.bits / 8
        if self.tile is None:
            return int(payload)
        tall, wide = self.tile[0], self.tile[1] or columns
        return int(payload + -(-rows // tall) * -(-columns // max(wide, 1)) * self.scale_bytes)


_KNOWN = (
    NumberFormat("fp32", 32),
    NumberFormat("bf16", 16),
    NumberFormat("fp16", 16),
    NumberFormat("fp8", 8, (128, 128), 4),
    NumberFormat("fp8-channel", 8, (1, None), 4),
    NumberFormat("int4", 4, (1, 128), 2),
    NumberFormat("awq", 4, (1, 128), 2.5),
    NumberFormat("gptq", 4, (1, 128), 2.5),
    NumberFormat("mxfp4", 4, (1, 32), 1),
    NumberFormat("nvfp4", 4, (1, 16), 1),
)
FORMATS = {known.name: known for known in _KNOWN}
"""`fp8` has a scale per 128 x 128 block, `fp8-channel` one per output channel or tensor."""

PLAIN = ("fp32", "bf16", "fp16")
DTYPE_NAMES = dict(zip(PLAIN, PLAIN, strict=True)) | {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
"""The plain formats by every name they go by: ours, torch's and vLLM's."""
FP8_FORMATS = ("fp8", "fp8-channel")
KV_FORMATS = ("bf16", "fp16", "fp32", "fp8")
STATE_DTYPES = ("auto", "fp32", "bf16")
"""Of recurrent states. With `auto` as checkpoints ask for (`mamba_ssm_dtype`), which is fp32."""
