"""One short file a family: its configuration as a ModelSpec, and the names of its checkpoints. No torch."""

from phalanx.models.config import describe, read_config

__all__ = ["describe", "read_config"]
