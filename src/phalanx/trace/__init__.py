"""Traces of steps over all ranks: slices of time, who waited for whom, what dominates. No torch."""
