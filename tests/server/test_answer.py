"""From tokens to what a client is told: text, reasoning, calls, ends, counts, and a mailbox with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from phalanx.engine.sampling import SamplingParams
from phalanx.server import mailbox
from phalanx.server.answer import Answer, AnswerPiece, Question
from phalanx.server.chat import ChatFormat
from phalanx.server.completions import CompletionFormat
from phalanx.server.errors import ApiError
from phalanx.server.mailbox import Mailbox
from phalanx.server.messages import NewToken
from phalanx.server.parsers import OutputParser, ToolSchema
from phalanx.server.templates import thinking_in
from phalanx.text.tokenizer import Tokenizer
from phalanx.weights.checkpoint import locate

END = 2
"""<|im_end|> of the default model."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(locate(None))
    assert loaded is not None
    assert loaded.token_bytes(END) == b"<|im_end|>"
    return loaded


class Script:
    """An engine that says what it is told to: every request gets these tokens, in messages of this many."""

    def __init__(self, tokens: Sequence[int], finish: str, at_once: int = 1) -> None:
        self.tokens, self.finish, self.at_once = list(tokens), finish, at_once
        self.submitted: list[tuple[list[int], SamplingParams, str | None, bytes | None]] = []
        self.cancelled: list[int] = []

    def submit(
        self, prompt, params, mailbox: Mailbox, choice: int, salt=None, grammar=None, owner="", adapter=None
    ) -> int:  # type: ignore[no-untyped-def]
        self.submitted.append((prompt, params, salt, grammar))
        id = len(self.submitted) - 1
        asyncio.get_running_loop().create_task(self._tell(id, mailbox, choice))
        return id

    async def _tell(self, id: int, mailbox: Mailbox, choice: int) -> None:
        for index, token in enumerate(self.tokens):
            last = index == len(self.tokens) - 1
            drafted = (index // 2, index)
            mailbox.put(choice, NewToken(id, token, self.finish if last else None, 16, 0.25, drafted=drafted))
            if (index + 1) % self.at_once == 0:
                await asyncio.sleep(0)

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)


class Silent:
    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []

    def first_token(self, after_s: float) -> None:
        self.first.append(after_s)

    def next_token(self, after_s: float) -> None:
        self.gaps.append(after_s)


def play(
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    finish: str = "length",
    parser: Callable[[], OutputParser] | None = None,
    at_once: int = 1,
    questions: int = 1,
    **options: Any,
) -> tuple[Answer, list[list[AnswerPiece]], Script]:
    """The batches of pieces an answer makes of this text."""
    tokens = tokenizer.encode(text, special_tokens=False) if isinstance(text, str) else text
    most_calls = options.pop("most_calls", 128)
    engine = Script(tokens, finish, at_once)
    question = Question([1, 2, 3], SamplingParams(**options), "salt", b"grammar", parser, most_calls)
    answer = Answer([question] * questions, tokenizer, [END], Silent())

    async def run() -> list[list[AnswerPiece]]:
        return [pieces async for pieces in answer.pieces(engine)]  # type: ignore[arg-type]

    return answer, asyncio.run(run()), engine


def told(batches: list[list[AnswerPiece]], choice: int = 0) -> tuple[str, str, list[tuple[int, str | None, str]]]:
    pieces = [piece for batch in batches for piece in batch if piece.choice == choice]
    calls = [(call.index, call.name, call.arguments) for piece in pieces for call in piece.tool_calls]
    return "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces), calls


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_text_comes_whole_however_tokens_are_batched(tokenizer: Tokenizer, at_once: int) -> None:
    text = "Grüße an alle 🌍🎉 und die Welt."
    answer, batches, _ = play(tokenizer, text, at_once=at_once)
    assert told(batches)[0] == text
    assert batches[-1][0].finish_reason == "length"
    assert answer.output_tokens == len(tokenizer.encode(text))
    if at_once == 1000:
        assert len(batches) == 1


def test_the_end_token_is_no_text_but_counts(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("Hello"), END]
    answer, batches, _ = play(
        tokenizer, tokens, finish="stop", parser=lambda: OutputParser("deepseek_r1", None, (), False)
    )
    assert told(batches)[0] == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.output_tokens == len(tokens)


def test_a_stop_token_of_the_request_is_no_text_either(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hello world")
    _, batches, _ = play(tokenizer, tokens, finish="stop", stop_token_ids=[tokens[-1]])
    assert told(batches)[0] == tokenizer.decode(tokens[:-1])


def test_a_stop_string_ends_the_choice_and_the_engine_s_work(tokenizer: Tokenizer) -> None:
    answer, batches, engine = play(tokenizer, "one two three four five six", stop=["three"])
    assert told(batches)[0] == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert engine.cancelled[0] == 0
    assert answer.output_tokens == 3


def test_held_back_text_comes_with_the_end(tokenizer: Tokenizer) -> None:
    _, batches, _ = play(tokenizer, "almost thr", stop=["three"])
    assert told(batches)[0] == "almost thr"


def test_reasoning_is_told_apart_and_its_tokens_counted(tokenizer: Tokenizer) -> None:
    text = "Let me think about it.</think>\n\nForty-two."
    answer, batches, _ = play(tokenizer, text, parser=lambda: OutputParser("qwen3", None, (), True))
    assert told(batches)[:2] == ("Forty-two.", "Let me think about it.")
    usage: Any = answer.usage()
    thought = len(tokenizer.encode("Let me think about it.</think>"))
    details, last = usage["completion_tokens_details"], usage["completion_tokens"] - 1
    assert abs(details["reasoning_tokens"] - thought) <= 1
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (last // 2, last)


CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


def hermes() -> OutputParser:
    return OutputParser(None, "hermes", [ToolSchema("f", {}), ToolSchema("g", {})])


def test_calls_end_an_answer_as_tool_calls(tokenizer: Tokenizer) -> None:
    answer, batches, _ = play(tokenizer, CALLS, finish="stop", parser=hermes)
    content, _, calls = told(batches)
    assert not content
    assert [name for _, name, _ in calls if name] == ["f", "g"]
    assert "".join(arguments for index, _, arguments in calls if index == 0) == '{"a": 1}'
    assert answer.choices[0].finish_reason == "tool_calls"


def test_calls_cut_short_end_as_length(tokenizer: Tokenizer) -> None:
    answer, _, _ = play(tokenizer, CALLS[:40], finish="length", parser=hermes)
    assert answer.choices[0].finish_reason == "length"


def test_one_call_at_a_time_where_the_client_wants_it(tokenizer: Tokenizer) -> None:
    _, batches, _ = play(tokenizer, CALLS, finish="stop", parser=hermes, most_calls=1)
    assert {index for index, _, _ in told(batches)[2]} == {0}


def test_questions_and_choices_are_numbered_through_and_counted(tokenizer: Tokenizer) -> None:
    answer, batches, engine = play(tokenizer, "Hello world", questions=2, n=3, seed=7)
    assert [told(batches, choice)[0] for choice in range(6)] == ["Hello world"] * 6
    assert [params.seed for _, params, _, _ in engine.submitted] == [7, 8, 9, 7, 8, 9]
    assert all(
        params.n == 1 and salt == "salt" and grammar == b"grammar" for _, params, salt, grammar in engine.submitted
    )
    usage: Any = answer.usage()
    assert usage["prompt_tokens"] == 6
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32


def test_an_answer_left_early_cancels_what_runs(tokenizer: Tokenizer) -> None:
    engine = Script([1] * 50, "length")
    answer = Answer([Question([1], SamplingParams(n=2))], tokenizer, [END], Silent())

    async def leave() -> None:
        pieces = answer.pieces(engine)  # type: ignore[arg-type]
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(leave())
    assert engine.cancelled == [0, 1]


def test_times_are_told_once_a_token(tokenizer: Tokenizer) -> None:
    listener = Silent()
    engine = Script(tokenizer.encode("one two three"), "length")
    answer = Answer([Question([1], SamplingParams())], tokenizer, [END], listener)

    async def run() -> None:
        async for _ in answer.pieces(engine):  # type: ignore[arg-type]
            pass

    asyncio.run(run())
    assert len(listener.first) == 1
    assert len(listener.gaps) == 2
    assert min([*listener.first, *listener.gaps]) >= 0


def test_a_mailbox_nobody_empties_closes_and_says_so() -> None:
    box = Mailbox()
    token = NewToken(1, 5, None, 0, 0.0)
    assert all(box.put(0, token) for _ in range(mailbox.MOST_UNREAD))
    assert not box.put(0, token)
    assert not box.put(0, token)
    with pytest.raises(ApiError, match="waiting to be read"):
        asyncio.run(box.take())


def test_a_closed_mailbox_gives_what_it_has_first() -> None:
    box = Mailbox()
    box.put(0, NewToken(1, 5, None, 0, 0.0))
    box.close(ApiError(500, "gone", "gone"))
    assert len(asyncio.run(box.take())) == 1
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(box.take())


def test_a_mailbox_tells_what_closed_it_first() -> None:
    box = Mailbox()
    box.close(ApiError(499, "left", "client_gone"))
    box.close(ApiError(500, "died", "engine_died"))
    with pytest.raises(ApiError, match="left"):
        asyncio.run(box.take())


def test_the_role_comes_once_with_the_first_piece_of_each_choice(tokenizer: Tokenizer) -> None:
    format = ChatFormat("id", 0, "model", tokenizer)
    answer = Answer([Question([1], SamplingParams(n=2))], tokenizer, [END], Silent())
    roles = [format.choice(AnswerPiece(choice, "x"), answer).delta.role for choice in (0, 0, 1, 1)]
    assert roles == ["assistant", None, "assistant", None]


def test_chunks_are_these_bytes(tokenizer: Tokenizer) -> None:
    """Clients may take any JSON; a change of what all of them get is to be meant."""
    answer = Answer([Question([1, 7], SamplingParams(), tell_tokens=True)], tokenizer, [END], Silent())
    last = AnswerPiece(0, finish_reason="stop")
    answer.choices[0].output_tokens = 1
    answer.choices[0].stop_reason = 5
    usage = msgspec.json.encode(answer.usage())
    chat = ChatFormat("id", 17, 'm"', tokenizer, continuous_usage=True)
    head = b'data: {"id":"id","created":17,"model":"m\\"","choices":['
    assert chat.events(AnswerPiece(0, '"é\n', tokens=[9]), answer) == (
        head + b'{"index":0,"delta":{"role":"assistant","content":"\\"\xc3\xa9\\n"},"logprobs":null,'
        b'"finish_reason":null,"stop_reason":null,"token_ids":[9]}],"usage":' + usage + b',"prompt_token_ids":[1,7],'
        b'"object":"chat.completion.chunk"}\n\n'
    )
    assert chat.events(last, answer) == (
        head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":5}],"usage":' + usage + b","
        b'"object":"chat.completion.chunk"}\n\n'
    )
    plain = CompletionFormat("id", 17, 'm"', tokenizer, [""], include_usage=True)
    assert plain.events(AnswerPiece(0, "x"), answer) == (
        head + b'{"index":0,"text":"x","logprobs":null,"finish_reason":null,"stop_reason":null,'
        b'"prompt_token_ids":[1,7]}],"object":"text_completion"}\n\n'
    )
    assert plain.last_events(answer) == (
        head + b'],"usage":' + usage + b',"object":"text_completion"}\n\ndata: [DONE]\n\n'
    )


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", None),
    ],
)
def test_the_prompt_tells_whether_the_model_thinks(prompt: str, state: bool | None) -> None:
    assert thinking_in(prompt) is state
