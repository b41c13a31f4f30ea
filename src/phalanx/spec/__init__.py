"""What things are. No torch."""

from phalanx.spec.formats import FORMATS, NumberFormat, Quantization
from phalanx.spec.layout import Layout, Shard
from phalanx.spec.model import DeltaNet, Indexer, LayerCache, Mla, ModelSpec, Moe, Rope, Tensor

__all__ = [
    "FORMATS",
    "DeltaNet",
    "Indexer",
    "LayerCache",
    "Layout",
    "Mla",
    "ModelSpec",
    "Moe",
    "NumberFormat",
    "Quantization",
    "Rope",
    "Shard",
    "Tensor",
]
