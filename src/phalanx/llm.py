"""LLM: a model in this process, for scripts and notebooks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import msgspec
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phalanx.engine.embedding import normalised
from phalanx.engine.logprobs import TokenLogprobs
from phalanx.engine.output import NO_TOKEN, Output
from phalanx.engine.request import Request
from phalanx.engine.sampling import SamplingParams
from phalanx.errors import ConfigError, RequestError
from phalanx.runtime.config import EngineConfig
from phalanx.runtime.start import start_engine
from phalanx.spec.pooling import pooling_of
from phalanx.text.answer import AnswerText
from phalanx.text.tokenizer import Messages, Tokenizer
from phalanx.weights.checkpoint import locate, model_name

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Choice:
    """One answer. `finish_reason` is 'stop' (end token, stop token or stop string) or 'length'.

    The token that ends it is the last of `token_ids` and no part of `text`.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int


@dataclass(frozen=True)
class Generation:
    """The answers to one prompt: `choices` has `n` of them, and the first one's fields stand here too.

    `prompt_logprobs`, where they were asked for, has an entry for each token of the prompt; nothing is known of the
    first.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs

    @property
    def cached_tokens(self) -> int:
        return self.choices[0].cached_tokens


@dataclass
class _Answer:
    """An answer in the making."""

    request: Request
    stream: AnswerText | None
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None
    finish_reason: str | None = None

    def to_choice(self) -> Choice:
        assert self.finish_reason is not None
        return Choice(
            text="".join(self.text),
            token_ids=self.tokens,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if self.request.params.logprobs is not None else None,
            cached_tokens=self.request.cached_tokens or 0,
        )


class LLM:
    """A model, sharded over `tp` ranks, that answers batches of prompts.

        with LLM("Qwen/Qwen3-0.6B", tp=2) as llm:
            print(llm.generate("The capital of France is", SamplingParams(temperature=0)).text)

    Without a model name it is SmolLM2-135M-Instruct. Other keywords are those of `EngineConfig`.
    """

    def __init__(self, model: str | Path | None = None, tp: int = 1, progress: bool = True, **options: Any) -> None:
        try:
            config = EngineConfig(model=None if model is None else str(model), tp=tp, **options)
        except TypeError as error:
            raise ConfigError(
                "bad_option", f"{error}.", f"Options are {', '.join(EngineConfig.__struct_fields__)}."
            ) from None
        self._progress = progress
        self._answers: dict[int, _Answer] = {}
        self._path = path = locate(model)
        self.tokenizer = Tokenizer.load(path)
        with _Bar(f"Loading {model_name(path)}, TP={tp}", DownloadColumn(), progress) as update:
            self.engine = start_engine(config, path, update)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks. Requests still running are lost."""
        self.engine.close()

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams | None = None, salt: str | None = None, adapter: str | None = None
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Generation]: ...

    def generate(self, prompts: Any, params: Any = None, salt: str | None = None, adapter: str | None = None) -> Any:
        """Answer one prompt (a string or token ids) with a Generation, or a list of prompts with a list of them.

        `params` is for all prompts or a list with one each. Prompts with the same `salt` may share cached prefixes.
        With an `adapter`, by its name, they are answered by the model as that changes it.
        """
        single = isinstance(prompts, str) or _is_token_ids(prompts)
        batch = [prompts] if single else prompts
        generations = self._run([self._encode(prompt) for prompt in batch], params, salt, adapter)
        return generations[0] if single else generations

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Generation]: ...

    def chat(self, messages: Any, params: Any = None, salt: str | None = None, adapter: str | None = None) -> Any:
        """Answer a conversation through the model's chat template, or a list of conversations with a list."""
        single = not messages or isinstance(messages[0], Mapping)
        batch = [messages] if single else messages
        generations = self._run([self.encode_chat(conversation) for conversation in batch], params, salt, adapter)
        return generations[0] if single else generations

    @overload
    def embed(self, prompts: Prompt, pooling: str | None = None) -> list[float]: ...  # type: ignore[overload-overlap]

    @overload
    def embed(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], pooling: str | None = None
    ) -> list[list[float]]: ...

    def embed(self, prompts: Any, pooling: str | None = None) -> Any:
        """The embedding of a text (a string or token ids), or of each of a list of them.

        `pooling` is "mean" or "last"; by default as the model's own files say, or "last". They have length 1, unless
        those files say otherwise.
        """
        how = pooling_of(self._path, pooling)
        if how.kind is None:
            raise RequestError("bad_parameter", f"This model's pooling, {how.found}, is not known.", "Give one.")
        single = isinstance(prompts, str) or _is_token_ids(prompts)
        tokens = [self._encode(prompt) for prompt in ([prompts] if single else prompts)]
        answers = self._answers_to(tokens, SamplingParams(max_tokens=0, pooling=how.kind), None, None)
        found = [answer.embedding or b"" for (answer,) in answers]
        vectors = [array("f", normalised(each) if how.normalised else each).tolist() for each in found]
        return vectors[0] if single else vectors

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter in PEFT's form. `lora_memory` says how much room there is for such."""
        self.engine.load_adapter(name, Path(folder))

    def unload_adapter(self, name: str) -> None:
        self.engine.unload_adapter(name)

    def encode_chat(self, messages: Messages) -> list[int]:
        """A conversation as the token ids of a prompt, by the model's chat template."""
        return self._need_tokenizer("chat").encode_chat(messages)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Answer one prompt piece by piece, as text comes. Leaving the loop early ends the request.

        For a conversation, give `llm.encode_chat(messages)`. With `n` above 1 only the first answer is made.
        """
        tokens, params = self._encode(prompt), msgspec.structs.replace(params or SamplingParams(), n=1)
        self._need_tokenizer("streaming text")
        self._check(tokens, params)
        return self._tell(tokens, params, salt, adapter)

    def _tell(self, tokens: list[int], params: SamplingParams, salt: str | None, adapter: str | None) -> Iterator[str]:
        (answer,) = self._submit(tokens, params, salt, adapter)
        with self._dropped_at_the_end([answer]):
            told = 0
            while answer.finish_reason is None or told < len(answer.text):
                if told == len(answer.text):
                    self._step()
                piece = "".join(answer.text[told:])
                told = len(answer.text)
                if piece:
                    yield piece

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str | None,
        adapter: str | None,
    ) -> list[Generation]:
        return [
            Generation(prompt, [answer.to_choice() for answer in group], group[0].prompt_logprobs)
            for prompt, group in zip(prompts, self._answers_to(prompts, params, salt, adapter), strict=True)
        ]

    def _answers_to(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str | None,
        adapter: str | None,
    ) -> list[list[_Answer]]:
        each = _params_for(params, len(prompts))
        for prompt, wanted in zip(prompts, each, strict=True):
            self._check(prompt, wanted)
        groups = [self._submit(prompt, wanted, salt, adapter) for prompt, wanted in zip(prompts, each, strict=True)]
        answers = [answer for group in groups for answer in group]
        with (
            self._dropped_at_the_end(answers),
            _Bar("Generating", MofNCompleteColumn(), self._progress and len(answers) > 1) as update,
        ):
            while not all(answer.finish_reason for answer in answers):
                self._step()
                update(sum(answer.finish_reason is not None for answer in answers), len(answers))
        return groups

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        self.engine.check(prompt, params)
        if params.stop:
            self._need_tokenizer("stop strings")

    def _submit(
        self, prompt: list[int], params: SamplingParams, salt: str | None, adapter: str | None
    ) -> list[_Answer]:
        """The n answers to a prompt are requests of their own, with seeds of their own; the prefix cache joins them."""
        answers = []
        for index in range(params.n):
            request = self.engine.add(prompt, params.of_choice(index), salt, adapter=adapter)
            ends = (*self.engine.scheduler.eos_token_ids, *params.stop_token_ids)
            stream = AnswerText(self.tokenizer, params.stop, ends) if self.tokenizer else None
            self._answers[request.id] = _Answer(request, stream)
            answers.append(self._answers[request.id])
        return answers

    @contextmanager
    def _dropped_at_the_end(self, answers: list[_Answer]) -> Iterator[None]:
        """However it ends, by an error or by a caller who listens no longer: nothing of these requests stays behind."""
        try:
            yield
        finally:
            for answer in answers:
                self.engine.cancel(answer.request.id)
                del self._answers[answer.request.id]

    def _step(self) -> None:
        """A step may bring several tokens of an answer, and one of them may be its last."""
        for output in self.engine.step():
            answer = self._answers.get(output.request_id)
            if answer is not None and answer.finish_reason is None:
                self._take(answer, output)

    def _take(self, answer: _Answer, output: Output) -> None:
        """Book a token. A stop string may end the answer before the engine would."""
        if answer.request.error is not None:
            raise answer.request.error
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = [None, *output.prompt_logprobs]
        if output.token == NO_TOKEN:
            answer.embedding, answer.finish_reason = output.embedding, output.finish_reason
            return
        answer.tokens.append(output.token)
        if output.logprobs is not None:
            answer.logprobs.append(output.logprobs)
        answer.finish_reason = output.finish_reason
        if answer.stream is None:
            return
        text, answer.finish_reason = answer.stream.add(output.token, output.finish_reason)
        answer.text.append(text)
        if answer.finish_reason is not None:
            self.engine.cancel(output.request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return self._need_tokenizer("text prompts").encode(prompt)

    def _need_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "no_tokenizer", f"This checkpoint has no tokenizer.json, so {purpose} cannot work.", "Give token ids."
            )
        return self.tokenizer


def _is_token_ids(prompts: Sequence[Any]) -> bool:
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "bad_parameter", f"{len(params)} sampling parameters for {count} prompts.", "Give one, or one a prompt."
        )
    return list(params)


class _Bar:
    """A progress bar that callers move with (done, total); drawn only on a terminal, gone when finished."""

    def __init__(self, title: str, counter: Any, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeElapsedColumn())
        self._progress = Progress(*columns, transient=True, disable=not shown)
        self._title = title

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        task = self._progress.add_task(self._title, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
