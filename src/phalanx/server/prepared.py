"""What the server and the processes that read its requests say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.engine.sampling import SamplingParams
from phalanx.server.fields import MAX_TOOLS
from phalanx.server.forked import Lane
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.rules import TokenRules
from phalanx.server.parsers import ToolSchema
from phalanx.spec.pooling import USUAL, Pooling

QUICK, LARGE = 0, 1
LANES = (Lane(cpu_s=2.0), Lane(cpu_s=20.0, niceness=10))
"""Small requests do not wait for large ones."""

RequestKind = Literal[
    "chat", "completion", "tokenize", "detokenize", "message", "message_tokens", "response", "embedding"
]


class Assignment(msgspec.Struct, frozen=True):
    """The model whose requests are read, by its names. `templates` are its chat templates, as transformers has them.

    With `tools_in_words` they know no tools, which are told to the model in plain words.
    """

    names: list[str]
    tokenizer: str
    templates: dict[str, str]
    special_tokens: dict[str, str | list[str]]
    vocab: int
    context: int
    tool_parser: str | None
    tools_in_words: bool = False
    pooling: Pooling = USUAL
    hidden: int = 0


class ReaderReady(msgspec.Struct, frozen=True):
    """Requests can be read. Of a chat template that cannot be used, `bad_template` says why."""

    bad_template: str | None = None


class Asked(msgspec.Struct, frozen=True):
    """A request's body, as it came; and what came before it, if it goes on with an answer that was kept.

    `adapters` may be asked for by their names, beside the model's own.
    """

    kind: RequestKind
    body: bytes
    earlier: bytes | None = None
    adapters: list[str] = []


class ResponseRecord(msgspec.Struct, frozen=True):
    """What an answer by /v1/responses says of its request, and what is kept of it if it is to be kept.

    `echo` has fields of the answer as JSON, `items` the conversation so far as a JSON list.
    """

    echo: bytes
    items: bytes
    store: bool
    logprobs: bool
    sealed_reasoning: bool


class EmbeddingForm(msgspec.Struct, frozen=True):
    """How embeddings are written."""

    base64: bool
    normalised: bool


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """What a request for an answer comes to. `thinking` is whether its prompt ends within a thought, or after one.

    `model` is the name it was asked by; `echoes` has what goes before the answers to each prompt; `unknown` are fields
    nobody reads. With `echo_logprobs` the echo has its log-probabilities; `prompt_logprobs` are told on their own.
    """

    model: str
    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    salt: str | None
    constraint: Constraint | None
    unknown: list[str]
    rules: TokenRules | None = None
    tools: list[ToolSchema] = []
    most_calls: int = MAX_TOOLS
    thinking: bool | None = None
    echoes: list[str] = []
    continuous_usage: bool = False
    keep_special: bool = False
    keep_stop: bool = False
    tell_tokens: bool = False
    record: ResponseRecord | None = None
    echo_logprobs: bool = False
    prompt_logprobs: int | None = None
    embedding: EmbeddingForm | None = None


class TokenizedText(msgspec.Struct, frozen=True, tag=True):
    """`words` are the tokens as text, where that was asked for."""

    tokens: list[int]
    words: list[str] | None = None


class Continues(msgspec.Struct, frozen=True, tag=True):
    """The request goes on with an answer that was kept: it is to be read again, with what came before."""

    response: str


class DetokenizedText(msgspec.Struct, frozen=True, tag=True):
    text: str


class Problem(msgspec.Struct, frozen=True, tag=True):
    """The fields of an ApiError. `trace` is for the log: of a mistake that is the server's own."""

    status: int
    message: str
    code: str
    param: str | None = None
    trace: str = ""


ReadRequest = Prepared | TokenizedText | DetokenizedText | Continues | Problem

encode = msgspec.msgpack.encode
decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
decode_ready = msgspec.msgpack.Decoder(ReaderReady).decode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_outcome = msgspec.msgpack.Decoder(ReadRequest).decode
