"""/v1/embeddings: from pieces to OpenAI's embedding objects."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Any

import msgspec

from phalanx.engine.embedding import normalised
from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.errors import ApiError
from phalanx.server.prepared import EmbeddingForm

AT_ONCE = 16
"""Texts of one request that the engine has at a time: a request may bring more than it has places."""


class EmbeddingFormat:
    """Writes embeddings, which are never streamed."""

    def __init__(self, model: str) -> None:
        self._model = model

    def error(self, error: ApiError) -> object:
        return error.body

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> dict[str, Any]:
        ordered = sorted(pieces, key=lambda piece: piece.choice)
        tokens = answer.prompt_tokens
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": piece.choice, "embedding": piece.embedding} for piece in ordered],
            "model": self._model,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            },
        }


def written(form: EmbeddingForm, embedding: bytes) -> msgspec.Raw:
    """As JSON, each when it comes: millions of numbers at once would hold up other clients."""
    found = normalised(embedding) if form.normalised else embedding
    return msgspec.Raw(msgspec.json.encode(b64encode(found).decode() if form.base64 else array("f", found).tolist()))
