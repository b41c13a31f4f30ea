"""/v1/responses: from pieces to OpenAI's responses and their events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from phalanx.server import logprobs
from phalanx.server.answer import Answer, AnswerPiece
from phalanx.server.blocks import Block, Blocks, Change, blocks_of
from phalanx.server.errors import ApiError
from phalanx.server.prepared import ResponseRecord
from phalanx.server.responses.translate import sealed
from phalanx.server.sse import named_event
from phalanx.text.tokenizer import Tokenizer

Event = dict[str, Any]
Keep = Callable[[bytes, list[dict[str, Any]]], None]
"""What is done with a response that is whole: its JSON, and the items of its output."""

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesFormat:
    """Writes a response, whole or as events. It begins with the first token, not before."""

    def __init__(self, id: str, created: int, record: ResponseRecord, tokenizer: Tokenizer, keep: Keep) -> None:
        self._id = id
        self._created = created
        self._record = record
        self._echo = msgspec.json.decode(record.echo, type=dict[str, msgspec.Raw])
        self._tokenizer = tokenizer
        self._keep = keep
        self._blocks = Blocks()
        self._sent = 0

    def events(self, piece: AnswerPiece, answer: Answer) -> bytes:
        return self._start() + self._written(
            event for change in self._blocks.add(piece) for event in self._told(change, "completed")
        )

    def last_events(self, answer: Answer) -> bytes:
        ends = [event for change in self._blocks.finish() for event in self._told(change, _status(answer))]
        whole = self._whole(self._blocks.all, answer)
        return self._start() + self._written(
            [*ends, {"type": f"response.{whole['status']}", "response": whole}],
        )

    def last_error(self, error: ApiError, answer: Answer) -> bytes:
        told = {"code": error.body["error"]["code"], "message": error.body["error"]["message"]}
        failed = self._response("failed", [self._item(block, "incomplete") for block in self._blocks.all])
        return self._written([{"type": "response.failed", "response": failed | {"error": told}}])

    def error(self, error: ApiError) -> object:
        return error.body

    def body(self, pieces: list[AnswerPiece], answer: Answer) -> dict[str, Any]:
        return self._whole(blocks_of(pieces), answer)

    def _whole(self, blocks: list[Block], answer: Answer) -> dict[str, Any]:
        status = _status(answer)
        output = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, output) | {"incomplete_details": reason, "usage": _usage(answer)}
        if self._record.store:
            self._keep(msgspec.json.encode(response), output)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._echo,
        }

    def _start(self) -> bytes:
        if self._sent:
            return b""
        begun = self._response("in_progress", [])
        return self._written({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))

    def _written(self, events: Iterator[Event] | list[Event]) -> bytes:
        return b"".join([named_event(event | {"sequence_number": self._next()}) for event in events])

    def _next(self) -> int:
        self._sent += 1
        return self._sent - 1

    def _told(self, change: Change, status: str) -> Iterator[Event]:
        """The events of one change of a block. `status` is that of a block which ends."""
        what, block, more, tokens = change
        kind = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        at: Event = {"output_index": block.index}
        here = at | {"item_id": self._item_id(block)}
        if block.kind != "call":
            here["content_index"] = 0
        if what == "begins":
            yield {"type": "response.output_item.added", **at, "item": self._empty(block)}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **here, "part": self._part(block, "", [])}
        elif what == "grows":
            told = {"logprobs": self._logprobs(tokens)} if block.kind == "text" else {}
            yield {"type": f"response.{kind}.delta", **here, "delta": more, **told}
        else:
            if block.kind == "call":
                yield {"type": f"response.{kind}.done", **here, "name": block.name, "arguments": block.text}
            else:
                part = self._part(block, block.text, block.logprobs)
                told = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
                yield {"type": f"response.{kind}.done", **here, "text": block.text, **told}
                yield {"type": "response.content_part.done", **here, "part": part}
            yield {"type": "response.output_item.done", **at, "item": self._item(block, status)}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIX[block.kind]}_{self._id.removeprefix('resp_')}{block.index:02}"

    def _empty(self, block: Block) -> dict[str, Any]:
        """An item that has just begun."""
        item = self._item(Block(block.index, block.kind, block.id, block.name), "in_progress")
        begun: dict[str, Any] = {"arguments": ""} if block.kind == "call" else {"content": []}
        return item | begun

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text or "{}"}
            return {"type": "function_call", **head, **call}
        content = [self._part(block, block.text, block.logprobs)]
        if block.kind == "text":
            return {"type": "message", **head, "role": "assistant", "content": content}
        seal = sealed(block.text) if self._record.sealed_reasoning else None
        return {"type": "reasoning", **head, "summary": [], "content": content, "encrypted_content": seal}

    def _part(self, block: Block, text: str, tokens: logprobs.SampledTokens) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: logprobs.SampledTokens) -> list[Any]:
        return logprobs.for_chat(tokens, self._tokenizer)["content"] if tokens else []


def _status(answer: Answer) -> str:
    return "incomplete" if answer.choices[0].finish_reason == "length" else "completed"


def _usage(answer: Answer) -> dict[str, Any]:
    """What chat completions tell, under the names of Responses: thoughts, and drafts that came true or did not."""
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": output,
        "output_tokens_details": answer.usage()["completion_tokens_details"],
        "total_tokens": prompt + output,
    }
