"""Finds the file of a kind."""

from __future__ import annotations

from functools import cache

from phalanx.quant.awq import Awq
from phalanx.quant.base import SchemeAtWork
from phalanx.quant.fp8 import Fp8
from phalanx.quant.gguf import Gguf
from phalanx.quant.gptq import Gptq
from phalanx.quant.int4 import PackedInt4
from phalanx.quant.mxfp4 import Mxfp4
from phalanx.quant.nvfp4 import Nvfp4
from phalanx.spec.schemes import Kind, Scheme

_KINDS: dict[Kind, type[SchemeAtWork]] = {
    "fp8": Fp8,
    "awq": Awq,
    "gptq": Gptq,
    "int4": PackedInt4,
    "mxfp4": Mxfp4,
    "nvfp4": Nvfp4,
    "gguf": Gguf,
}


@cache
def at_work(scheme: Scheme) -> SchemeAtWork:
    return _KINDS[scheme.kind](scheme)
