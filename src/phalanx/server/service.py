"""Service: what the endpoints do, apart from HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.engine.core import check_request
from phalanx.errors import ConfigError
from phalanx.runtime.config import EngineConfig
from phalanx.server import chat
from phalanx.server.answer import Answer, Question
from phalanx.server.chat import ChatFormat
from phalanx.server.completions import CompletionFormat, echoes_of, prompts_of
from phalanx.server.constraints import constraint_of
from phalanx.server.errors import ApiError, bad_request
from phalanx.server.grammar.compiler import GrammarCompiler
from phalanx.server.grammar.constraint import after_thinking
from phalanx.server.metrics import Metrics
from phalanx.server.options import ServeOptions
from phalanx.server.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser, ToolSchema, parsers_for
from phalanx.server.protocol import MAX_TOOLS, ChatRequest, CompletionRequest, Sampling
from phalanx.server.reply import Format, Reply
from phalanx.server.supervisor import Supervisor
from phalanx.spec import ModelSpec
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import Checkpoint, locate

log = logging.getLogger("phalanx.request")


@dataclass(frozen=True)
class Service:
    """The model being served, under its name, with the parsers its outputs need."""

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    supervisor: Supervisor
    metrics: Metrics
    grammars: GrammarCompiler
    reasoning_parser: str | None
    tool_parser: str | None
    request_timeout_s: float

    async def chat(self, request: ChatRequest, headers: dict[str, str]) -> Reply:
        self.check_model(request.model)
        self._check_tools(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", param="top_logprobs")
        params = request.to_params(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=request.top_logprobs or 0 if request.logprobs else None,
        )
        tools = [] if request.tool_choice == "none" else request.tools or []
        constraint = constraint_of(request, self.tool_parser)
        text = await asyncio.to_thread(
            chat.render, self.tokenizer, request.messages, tools, request.chat_template_kwargs
        )
        prompt = await asyncio.to_thread(self.tokenizer.encode, text, special_tokens=False)
        parser = self._parser(request, text)
        if constraint is not None and parser is not None and parser().in_reasoning:
            constraint = after_thinking(constraint)
        question = Question(
            prompt,
            params,
            request.cache_salt,
            await self.grammars.compile(constraint) if constraint is not None else None,
            parser,
            most_calls=1 if request.parallel_tool_calls is False else MAX_TOOLS,
        )
        id = f"chatcmpl-{uuid.uuid4().hex}"
        return self._reply(request, [question], ChatFormat(id, int(time.time()), self.name, self.tokenizer), headers)

    async def complete(self, request: CompletionRequest, headers: dict[str, str]) -> Reply:
        self.check_model(request.model)
        params = request.to_params(request.max_tokens, request.logprobs)
        prompts = await asyncio.to_thread(prompts_of, request, self.tokenizer)
        echoes = echoes_of(request, prompts, self.tokenizer)
        constraint = constraint_of(request, self.tool_parser)
        grammar = await self.grammars.compile(constraint) if constraint is not None else None
        questions = [Question(prompt, params, request.cache_salt, grammar) for prompt in prompts]
        id = f"cmpl-{uuid.uuid4().hex}"
        return self._reply(
            request, questions, CompletionFormat(id, int(time.time()), self.name, self.tokenizer, echoes), headers
        )

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self.name:
            raise ApiError(
                404, f"The model {asked!r} is not served here; {self.name!r} is.", "model_not_found", param="model"
            )

    def _check_tools(self, request: ChatRequest) -> None:
        choice = request.tool_choice
        names = [tool.function.name for tool in request.tools or []]
        if not names and choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but tools is empty.", param="tool_choice")
        if names and choice != "none" and self.tool_parser is None:
            raise bad_request(
                "This model has no known format for tool calls: start the server with --tool-call-parser.",
                param="tools",
            )
        if choice is not None and not isinstance(choice, str) and choice.function.name not in names:
            raise bad_request(
                f"tool_choice names {choice.function.name!r}, which is not in tools.", param="tool_choice"
            )

    def _parser(self, request: ChatRequest, prompt: str) -> Callable[[], OutputParser] | None:
        tools = self.tool_parser if request.tools and request.tool_choice != "none" else None
        if tools is None and self.reasoning_parser is None:
            return None
        schemas = [ToolSchema(tool.function.name, tool.function.parameters) for tool in request.tools or []]
        thinking = chat.thinking_in(prompt)
        return lambda: OutputParser(self.reasoning_parser, tools, schemas, thinking)

    def _reply(self, request: Sampling, questions: list[Question], format: Format, headers: dict[str, str]) -> Reply:
        started = self.supervisor.client.started
        if started is not None:
            for question in questions:
                check_request(question.prompt, question.params, started.vocab, started.max_model_len)
        choices = sum(question.params.n for question in questions)
        answer = Answer(questions, self.tokenizer, started.stop_tokens if started else [], self.metrics)
        return Reply(
            answer,
            engine=lambda: self.supervisor.admit(choices),
            format=format,
            stream=bool(request.stream),
            include_usage=request.stream_options is not None and request.stream_options.include_usage,
            timeout_s=self.request_timeout_s,
            headers=headers,
            on_finish=lambda answer, error: self._finished(headers["x-request-id"], answer, error),
        )

    def _finished(self, id: str, answer: Answer, error: ApiError | None) -> None:
        if answer.asked:
            self.metrics.answered(answer)
        firsts = [choice.first_at for choice in answer.choices if choice.first_at is not None]
        lasts = [choice.last_at for choice in answer.choices if choice.last_at is not None]
        ttft = f"{(min(firsts) - answer.arrived) * 1e3:.1f}" if firsts else "-"
        gaps = answer.output_tokens - len(firsts)
        decode = sum(last - first for first, last in zip(firsts, lasts, strict=True))
        log.info(
            "%s prompt=%d cached=%d output=%d ttft_ms=%s tpot_ms=%s reason=%s",
            id,
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.output_tokens,
            ttft,
            f"{decode / gaps * 1e3:.2f}" if gaps > 0 else "-",
            error.body["error"]["code"] if error else ",".join(str(choice.finish_reason) for choice in answer.choices),
        )


def build_service(
    name: str, config: EngineConfig, options: ServeOptions, supervisor: Supervisor, metrics: Metrics
) -> Service:
    """Reads what serving needs of the checkpoint: its tokenizer, and the family that says how outputs are parsed."""
    path = locate(config.model)
    spec = Checkpoint(path, config.load_format).spec
    reasoning, tools = _parsers(options, spec.model_type, name)
    return Service(
        name=name,
        spec=spec,
        tokenizer=_tokenizer(path),
        supervisor=supervisor,
        metrics=metrics,
        grammars=GrammarCompiler(path, spec.vocab, spec.eos_token_ids),
        reasoning_parser=reasoning,
        tool_parser=tools,
        request_timeout_s=options.request_timeout_s,
    )


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
