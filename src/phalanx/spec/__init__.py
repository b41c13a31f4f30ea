"""What things are. No torch."""

from phalanx.spec.layout import Layout, Shard
from phalanx.spec.model import ModelSpec, Moe, Rope, Tensor

__all__ = ["Layout", "ModelSpec", "Moe", "Rope", "Shard", "Tensor"]
