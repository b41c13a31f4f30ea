"""Embeddings as they travel: float32, packed."""

from __future__ import annotations

from array import array
from math import fsum, sqrt


def normalised(embedding: bytes) -> bytes:
    """At length 1. One of zeros alone stays as it is."""
    numbers = array("f", embedding)
    length = sqrt(fsum(number * number for number in numbers))
    return array("f", [number / length for number in numbers]).tobytes() if length else embedding
