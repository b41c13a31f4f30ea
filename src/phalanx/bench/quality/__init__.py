"""How far two checkpoints of a model are apart: what quantising has cost."""

from phalanx.bench.quality.compare import Comparison, compare_checkpoints
from phalanx.bench.quality.report import QualityReport, read_prompts, read_text, table

__all__ = ["Comparison", "QualityReport", "compare_checkpoints", "read_prompts", "read_text", "table"]
