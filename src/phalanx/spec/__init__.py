"""What things are. No torch."""

from phalanx.spec.attention import Gqa
from phalanx.spec.cache import LayerCache
from phalanx.spec.compressed import Compressed
from phalanx.spec.delta import DeltaNet
from phalanx.spec.ffn import Activation, Dense, Moe, Router
from phalanx.spec.formats import FORMATS, NumberFormat
from phalanx.spec.hyper import Hyper
from phalanx.spec.latent import Indexer, Mla
from phalanx.spec.layer import Layer, Norms
from phalanx.spec.layout import Layout, Shard
from phalanx.spec.model import ModelSpec
from phalanx.spec.rope import Rope
from phalanx.spec.schemes import Piece, Quantization, Scheme
from phalanx.spec.tensors import Tensor

__all__ = [
    "FORMATS",
    "Activation",
    "Compressed",
    "DeltaNet",
    "Dense",
    "Gqa",
    "Hyper",
    "Indexer",
    "Layer",
    "LayerCache",
    "Layout",
    "Mla",
    "ModelSpec",
    "Moe",
    "Norms",
    "NumberFormat",
    "Piece",
    "Quantization",
    "Rope",
    "Router",
    "Scheme",
    "Shard",
    "Tensor",
]
