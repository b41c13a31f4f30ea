"""Which layers a CPU computes in one call."""

from __future__ import annotations

import torch

from phalanx.kernels import cpu
from phalanx.kernels.gemm import Gemm, PanelGemm
from phalanx.kernels.layer import LayerParts, WholeLayer
from phalanx.layers.ffn.dense import Mlp
from phalanx.layers.mixers.gqa import Attention
from phalanx.layers.stream import Around
from phalanx.spec.ffn import SILU


def whole_layer(around_mixer: object, mixer: object, around_ffn: object, ffn: object) -> WholeLayer | None:
    """None where one of these parts does more than the kernel knows, or something in between."""
    if not (isinstance(mixer, Attention) and isinstance(ffn, Mlp)):
        return None
    if not (isinstance(around_mixer, Around) and isinstance(around_ffn, Around)):
        return None
    products = [mixer.qkv.product, mixer.output.product, ffn.gate_up.product, ffn.down.product]
    panels = [product for product in products if isinstance(product, PanelGemm) and not product.pack().e4m3]
    dense = [product for product in products if type(product) is Gemm and cpu.runs(product.weight)]
    before, after = around_mixer.before, around_ffn.before
    if (
        len(products) not in (len(panels), len(dense))
        or before is None
        or after is None
        or around_mixer.after
        or around_ffn.after
    ):
        return None
    record = mixer.record
    plain = mixer.gate is None and record.head_norm is None and record.temperature is None and record.rope is not None
    alone = mixer.group.size == 1 and around_mixer.scale == 1.0 and mixer.cache.dtype == torch.float32
    if not (plain and alone and ffn.activation == SILU):
        return None
    norms, sizes = (before.weight, after.weight), (before.eps, record.scale)
    return WholeLayer(LayerParts(*norms, tuple(panels) or tuple(dense), mixer.cache, mixer.heads, mixer.sight, *sizes))
