"""Service: what the endpoints do, apart from HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from phalanx.engine.core import check_length
from phalanx.errors import ConfigError
from phalanx.models.parsers import parsers_for
from phalanx.runtime.config import EngineConfig
from phalanx.server.access_log import note
from phalanx.server.answer import Answer, Question
from phalanx.server.anthropic.events import MessageFormat
from phalanx.server.chat import ChatFormat
from phalanx.server.completions import CompletionFormat
from phalanx.server.embeddings import AT_ONCE, EmbeddingFormat, written
from phalanx.server.errors import ApiError, model_not_found, response_not_found
from phalanx.server.grammar.compiler import GrammarCompiler
from phalanx.server.grammar.constraint import Constraint, after_thinking
from phalanx.server.grammar.rules import with_rules
from phalanx.server.keys import KeyRing
from phalanx.server.metrics import Metrics
from phalanx.server.options import ServeOptions
from phalanx.server.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser
from phalanx.server.places import Places
from phalanx.server.prepared import Assignment, Continues, DetokenizedText, Prepared, RequestKind, TokenizedText
from phalanx.server.preparer import Preparer
from phalanx.server.quotas import Quotas
from phalanx.server.reply import Format, Reply, StreamFormat
from phalanx.server.responses.events import ResponsesFormat
from phalanx.server.responses.store import Archive, Kept, ResponseStore, appended
from phalanx.server.supervisor import Supervisor
from phalanx.server.tool_prompt import PARSER, templates_know_tools
from phalanx.server.turnstile import Turnstile
from phalanx.server.visit import Visit
from phalanx.spec import ModelSpec
from phalanx.spec.pooling import USUAL, Pooling, pooling_of
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import Checkpoint, locate

if TYPE_CHECKING:
    from phalanx.server.traces import Traces

log = logging.getLogger("phalanx.server")

_MOST_NAMED = 16


@dataclass(frozen=True)
class Service:
    """The model being served, under its name and perhaps others, with the parsers its outputs need.

    With `tools_in_words` its chat template knows no tools: they are told in plain words.
    """

    name: str
    spec: ModelSpec
    context: int
    tokenizer: Tokenizer
    supervisor: Supervisor
    metrics: Metrics
    places: Places
    preparer: Preparer
    grammars: GrammarCompiler
    reasoning_parser: str | None
    tool_parser: str | None
    request_timeout_s: float
    share_prefixes: bool = False
    aliases: tuple[str, ...] = ()
    tools_in_words: bool = False
    responses: Archive = field(default_factory=lambda: Archive(ResponseStore()))
    pooling: Pooling = USUAL
    keys: KeyRing = field(default_factory=KeyRing)
    quotas: Quotas = field(default_factory=lambda: Quotas(KeyRing()))
    traces: Traces | None = None
    late: Turnstile = field(default_factory=Turnstile)

    @property
    def names(self) -> list[str]:
        return [self.name, *self.aliases]

    @property
    def assignment(self) -> Assignment:
        """What those who read requests need to know of the model."""
        return Assignment(
            names=self.names,
            tokenizer=self.tokenizer.backend.backend_tokenizer.to_str(),
            templates=self.tokenizer.chat_templates,
            special_tokens=self.tokenizer.backend.special_tokens_map,
            vocab=self.spec.vocab,
            context=self.context,
            tool_parser=self.tool_parser,
            tools_in_words=self.tools_in_words,
            pooling=self.pooling,
            hidden=self.spec.hidden,
        )

    async def chat(self, body: bytes, client: str, headers: dict[str, str]) -> Reply:
        asked = await self._prepared("chat", body, client)
        format = ChatFormat(
            f"chatcmpl-{_new()}", _now(), asked.model, self.tokenizer, asked.prompt_logprobs, **_usage_of(asked)
        )
        return await self._parsed_reply(asked, format, client, headers)

    async def complete(self, body: bytes, client: str, headers: dict[str, str]) -> Reply:
        asked = await self._prepared("completion", body, client)
        echoes = [echo for echo in asked.echoes for _ in range(asked.params.n)]
        format = CompletionFormat(
            f"cmpl-{_new()}",
            _now(),
            asked.model,
            self.tokenizer,
            echoes,
            asked.echo_logprobs,
            asked.prompt_logprobs,
            **_usage_of(asked),
        )
        questions = await self._questions(asked, asked.constraint, None, client)
        return self._streamed_reply(asked, questions, format, client, headers)

    async def embed(self, body: bytes, client: str, headers: dict[str, str]) -> Reply:
        asked = await self._prepared("embedding", body, client)
        questions = await self._questions(asked, None, None, client)
        return self._reply(asked, questions, EmbeddingFormat(asked.model), client, headers, at_once=AT_ONCE)

    async def message(self, body: bytes, client: str, headers: dict[str, str]) -> Reply:
        asked = await self._prepared("message", body, client)
        return await self._parsed_reply(asked, MessageFormat(f"msg_{_new()}", asked.model), client, headers)

    async def respond(self, body: bytes, client: str, headers: dict[str, str]) -> Reply:
        asked = await self._prepared("response", body, client)
        record, id = asked.record, f"resp_{_new()}"
        assert record is not None

        def keep(response: bytes, output: list[dict[str, Any]]) -> None:
            self.responses.put(client, id, Kept(response, appended(record.items, output)))

        format = ResponsesFormat(id, _now(), record, self.tokenizer, keep)
        return await self._parsed_reply(asked, format, client, headers)

    async def response(self, id: str, client: str) -> Kept:
        """One that was kept for this client."""
        kept = await self.responses.get(client, id)
        if kept is None:
            raise response_not_found(id)
        return kept

    async def tokenize(self, kind: Literal["tokenize", "message_tokens"], body: bytes, client: str) -> TokenizedText:
        outcome = await self.preparer.prepare(kind, body, client)
        assert isinstance(outcome, TokenizedText)
        return outcome

    async def detokenize(self, body: bytes, client: str) -> str:
        outcome = await self.preparer.prepare("detokenize", body, client)
        assert isinstance(outcome, DetokenizedText)
        return outcome.text

    def check_model(self, asked: str) -> None:
        if asked not in self.names and asked not in self.adapters:
            raise model_not_found(asked, self.name)

    @property
    def adapters(self) -> dict[str, str]:
        """Folders by name. An engine that is started again loads them again."""
        return self.supervisor.launch.config.lora

    async def load_adapter(self, name: str, folder: str) -> None:
        await asyncio.shield(asyncio.ensure_future(self._change_adapter(name, folder)))

    async def unload_adapter(self, name: str) -> None:
        await asyncio.shield(asyncio.ensure_future(self._change_adapter(name, None)))

    async def _change_adapter(self, name: str, folder: str | None) -> None:
        """In the engine, then in the books; a client that leaves between them changes nothing."""
        await self.supervisor.admit(0).change_adapter(name, folder)
        others = {each: where for each, where in self.adapters.items() if each != name}
        self.supervisor.set_adapters(others if folder is None else others | {name: folder})
        self.preparer.adapters = list(self.adapters)
        log.info("adapter %s is %s", name, "unloaded" if folder is None else f"loaded from {folder}")

    async def _prepared(self, kind: RequestKind, body: bytes, client: str) -> Prepared:
        outcome = await self.preparer.prepare(kind, body, client)
        if isinstance(outcome, Continues):
            earlier = (await self.response(outcome.response, client)).items
            outcome = await self.preparer.prepare(kind, body, client, earlier)
        assert isinstance(outcome, Prepared)
        started = self.supervisor.client.started
        if started is not None:
            for prompt in outcome.prompts:
                check_length(prompt, outcome.params, started.max_model_len)
        return outcome

    async def _parsed_reply(self, asked: Prepared, format: StreamFormat, client: str, headers: dict[str, str]) -> Reply:
        """An answer in which thoughts and calls are told apart."""
        parser, constraint = self._parser(asked), asked.constraint
        if constraint is not None and parser is not None and parser().in_reasoning:
            constraint = after_thinking(constraint)
        questions = await self._questions(asked, constraint, parser, client)
        return self._streamed_reply(asked, questions, format, client, headers)

    async def _questions(
        self,
        asked: Prepared,
        constraint: Constraint | None,
        parser: Callable[[], OutputParser] | None,
        client: str,
    ) -> list[Question]:
        grammar = await self.grammars.compile(constraint, client) if constraint is not None else None
        priority = self.keys.priority(client, asked.params.priority)
        params = msgspec.structs.replace(asked.params, priority=priority)
        if asked.rules is not None:
            grammar = with_rules(asked.rules, grammar)
        return [
            Question(
                prompt,
                params,
                self._salt(asked.salt, client),
                grammar,
                parser,
                asked.most_calls,
                keep_special=asked.keep_special,
                keep_stop=asked.keep_stop,
                tell_tokens=asked.tell_tokens,
                owner=client if self.places.shared and not self.keys.ranked else "",
                adapter=asked.model if asked.model in self.adapters else None,
                write_embedding=partial(written, asked.embedding) if asked.embedding is not None else None,
            )
            for prompt in asked.prompts
        ]

    def _salt(self, given: str | None, client: str) -> str | None:
        """What a key's prompts leave in the cache is found by that key alone, unless all share."""
        return given if self.share_prefixes or not client else f"{client} {given or ''}"

    def _parser(self, asked: Prepared) -> Callable[[], OutputParser] | None:
        tools = self.tool_parser if asked.tools else None
        if tools is None and self.reasoning_parser is None:
            return None
        return lambda: OutputParser(self.reasoning_parser, tools, asked.tools, asked.thinking)

    def _streamed_reply(
        self,
        asked: Prepared,
        questions: list[Question],
        format: StreamFormat,
        client: str,
        headers: dict[str, str],
    ) -> Reply:
        """Streamed if it was asked for so."""
        return self._reply(asked, questions, format, client, headers, format if asked.stream else None)

    def _reply(
        self,
        asked: Prepared,
        questions: list[Question],
        format: Format,
        client: str,
        headers: dict[str, str],
        stream: StreamFormat | None = None,
        at_once: int | None = None,
    ) -> Reply:
        started = self.supervisor.client.started
        choices, tokens = len(questions) * asked.params.n, sum(map(len, asked.prompts))
        choices = min(choices, at_once or choices)
        visit = Visit(self.places, self.quotas, client, tokens)
        answer = Answer(questions, self.tokenizer, started.stop_tokens if started else [], self.metrics, at_once)

        def finished(answer: Answer, error: ApiError | None) -> None:
            visit.leave(answer.output_tokens)
            self._finished(headers["x-request-id"], answer, error)

        return Reply(
            answer,
            engine=lambda: visit.enter(choices),
            format=format,
            stream=stream,
            timeout_s=self.request_timeout_s,
            headers=headers | _warning(asked.unknown),
            on_finish=finished,
            late=self.late,
        )

    def _finished(self, id: str, answer: Answer, error: ApiError | None) -> None:
        if answer.asked:
            self.metrics.answered(answer)
        if self.traces is not None:
            self.traces.answered(id, answer, error)
        firsts = [choice.first_at for choice in answer.choices if choice.first_at is not None]
        lasts = [choice.last_at for choice in answer.choices if choice.last_at is not None]
        gaps = answer.output_tokens - len(firsts)
        decode = sum(last - first for first, last in zip(firsts, lasts, strict=True))
        reasons = ",".join(str(choice.finish_reason) for choice in answer.choices)
        note(
            prompt=answer.prompt_tokens,
            cached=answer.cached_tokens,
            output=answer.output_tokens,
            ttft_ms=round((min(firsts) - answer.arrived) * 1e3, 1) if firsts else None,
            tpot_ms=round(decode / gaps * 1e3, 2) if gaps > 0 else None,
            reason=error.body["error"]["code"] if error else reasons,
        )


def _new() -> str:
    return uuid.uuid4().hex


def _now() -> int:
    return int(time.time())


def _usage_of(asked: Prepared) -> dict[str, bool]:
    return {"include_usage": asked.include_usage, "continuous_usage": asked.continuous_usage}


def _warning(unknown: list[str]) -> dict[str, str]:
    """A header that names the fields that mean nothing here."""
    if not unknown:
        return {}
    names = [re.sub(r"[^\x21-\x7e]", "?", name[:64]) for name in unknown[:_MOST_NAMED]]
    more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
    return {"x-phalanx-warning": f"unknown fields ignored: {', '.join(names)}{more}"}


def build_service(
    name: str,
    config: EngineConfig,
    options: ServeOptions,
    supervisor: Supervisor,
    metrics: Metrics,
    preparer: Preparer,
) -> Service:
    """Reads what serving needs of the checkpoint: its tokenizer, and the family that says how outputs are parsed."""
    path = locate(config.model)
    spec = Checkpoint(path, config.load_format).spec
    reasoning, tools = _parsers(options, spec.model_type, name)
    tokenizer = _tokenizer(path)
    in_words = options.tool_parser != "none" and (tools is None or not templates_know_tools(tokenizer.chat_templates))
    if in_words:
        log.info("the model's chat template knows no tools: they are told in plain words, and calls read as %s", PARSER)
    preparer.adapters = list(config.lora)
    for taken in {name, *options.served_names} & config.lora.keys():
        raise ConfigError("bad_option", f"--lora {taken}: the model itself is called so.", "Use another name.")
    return Service(
        name=name,
        spec=spec,
        context=config.max_model_len or spec.max_positions,
        tokenizer=tokenizer,
        supervisor=supervisor,
        metrics=metrics,
        places=Places(supervisor, shared=options.keys.several),
        preparer=preparer,
        grammars=GrammarCompiler(path, spec.vocab, spec.eos_token_ids, shared=options.keys.several),
        reasoning_parser=reasoning,
        tool_parser=PARSER if in_words else tools,
        request_timeout_s=options.request_timeout_s,
        share_prefixes=options.share_prefixes,
        aliases=options.served_names[1:],
        tools_in_words=in_words,
        responses=Archive(ResponseStore(options.response_store)),
        pooling=pooling_of(path, options.pooling),
        keys=options.keys,
        quotas=Quotas(options.keys),
        traces=_traces(options.otlp_traces_endpoint, name),
    )


def _traces(endpoint: str | None, model: str) -> Traces | None:
    if endpoint is None:
        return None
    try:
        from phalanx.server.traces import Traces
    except ModuleNotFoundError as error:
        raise ConfigError(
            "no_opentelemetry",
            f"--otlp-traces-endpoint needs {error.name}.",
            "Install Phalanx with its extra otel.",
        ) from None
    return Traces(endpoint, model)


def _parsers(options: ServeOptions, model_type: str, name: str) -> tuple[str | None, str | None]:
    """Those asked for, else those of the model's family."""
    for flag, asked, known in (
        ("--reasoning-parser", options.reasoning_parser, REASONING_PARSERS),
        ("--tool-call-parser", options.tool_parser, TOOL_PARSERS),
    ):
        if asked not in (None, "none") and asked not in known:
            raise ConfigError("bad_option", f"{flag} is {asked!r}.", f"Use one of {', '.join(known)}, or none.")
    reasoning, tools = parsers_for(model_type, name)
    return _asked_or(options.reasoning_parser, reasoning), _asked_or(options.tool_parser, tools)


def _asked_or(asked: str | None, default: str | None) -> str | None:
    return None if asked == "none" else asked or default


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    if tokenizer is None:
        raise ConfigError(
            "no_tokenizer", f"{path} has no tokenizer.json.", "A server needs one: add it from the model's repository."
        )
    return tokenizer
