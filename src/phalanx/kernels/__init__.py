"""The arithmetic of a step: plain torch functions that define each operation."""
