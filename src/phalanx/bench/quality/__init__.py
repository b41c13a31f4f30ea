"""How far two checkpoints of a model are apart: what quantising has cost."""

from phalanx.bench.quality.compare import Asked, compare_checkpoints
from phalanx.bench.quality.report import Report, read_prompts, read_text, table

__all__ = ["Asked", "Report", "compare_checkpoints", "read_prompts", "read_text", "table"]
