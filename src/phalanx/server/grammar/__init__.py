"""Structured output: from what a client asks for to a grammar that the engine can trust."""
