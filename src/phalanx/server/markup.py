"""What families write around thoughts and tool calls: parsers read it and grammars enforce it."""
# ruff: noqa: RUF001 - the bars are DeepSeek's own

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"

CALL, END_CALL = "<tool_call>", "</tool_call>"
"""Hermes and Qwen."""
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
"""Qwen3 Coder, inside a call."""

PYTHON_TAG = "<|python_tag|>"
"""Llama 3."""
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
"""Llama 4."""

DEEPSEEK_CALLS, DEEPSEEK_END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
