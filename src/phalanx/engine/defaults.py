"""What an engine is started with unless told otherwise; the planner counts on the same."""

from __future__ import annotations

MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
BLOCK_SIZE = 16
