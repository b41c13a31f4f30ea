"""How sixteen bits of a weight become four numbers of half precision, in a GPU's assembly."""

from __future__ import annotations

import torch

FOLDED, UNFOLD = 2.0**94, 2.0**32
"""What scales of e2m1 numbers are multiplied by, and sums afterwards. The bits of such a number, put where bfloat16 has
the same ones, are the number times 2^-126; all of 2^126 at once would leave no room for scales above one."""


def _assembly(body: str, constants: dict[str, str]) -> str:
    """$0 to $3: numbers i, i + 8, i + 16 and i + 24, each of two neighbours; $4: the two times sixteen bits; $5 and $6:
    the scales of the first two and of the others; $7: what is added to whole numbers. All is read before anything is
    written.
    """
    names = ", ".join(constants)
    moves = " ".join(f"mov.b32 {name}, {value};" for name, value in constants.items())
    out = " ".join(f"mov.b32 ${i}, p{i};" for i in range(4))
    return f"{{ .reg .b32 t, p0, p1, p2, p3, {names}; {moves} {body} {out} }}"


def _whole_numbers(kind: str, large: str, one: str, scaled: bool = True) -> str:
    """Or-ed into the mantissa of a number so large that its last bit counts one, which is taken off again."""
    body = ""
    for i in range(4):
        source = "$4" if i == 0 else "t"
        body += "" if i == 0 else f"shr.u32 t, $4, {4 * i}; "
        body += f"lop3.b32 t, {source}, 0x000F000F, {large}, 0xEA; fma.rn.{kind} p{i}, t, one, $7; "
        body += f"fma.rn.{kind} p{i}, p{i}, ${5 + i // 2}, none; " if scaled else ""
    return _assembly(body, {"one": one, "none": "0x80008000"})


def _e2m1() -> str:
    """Shifted to where bfloat16 has sign, the last two bits of the exponent and the first of the mantissa. The bits of
    the fourth number are two and two: copies of them, next to each other, come by a multiplication."""
    body = "and.b32 p0, $4, 0x81C081C0; shl.b32 t, $4, 3; and.b32 p1, t, 0x81C081C0; "
    body += "shl.b32 t, $4, 6; and.b32 p2, t, 0x81C081C0; "
    body += "shr.u32 t, $4, 7; and.b32 t, t, 0x00D800D8; mul.lo.u32 t, t, 0x821; and.b32 p3, t, 0x81C081C0; "
    body += " ".join(f"fma.rn.bf16x2 p{i}, p{i}, ${5 + i // 2}, none;" for i in range(4))
    return _assembly(body, {"none": "0x80008000"})


FOLDED_SCALES = (
    "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x4140; mad.lo.u32 $0, t, 128, 0x2F002F00; "
    "prmt.b32 t, $2, 0, 0x4342; mad.lo.u32 $1, t, 128, 0x2F002F00; }"
)
"""Four bytes as powers of two in bfloat16, times FOLDED."""

UNSCALED = {
    torch.bfloat16: _whole_numbers("bf16x2", "0x43004300", "0x3F803F80", scaled=False),
    torch.float16: _whole_numbers("f16x2", "0x64006400", "0x3C003C00", scaled=False),
}
"""Whole numbers whose scales multiply sums."""

ASSEMBLY = {
    ("int4", torch.bfloat16): _whole_numbers("bf16x2", "0x43004300", "0x3F803F80"),
    ("int4", torch.float16): _whole_numbers("f16x2", "0x64006400", "0x3C003C00"),
    ("e2m1", torch.bfloat16): _e2m1(),
}
