"""From messages and texts to prompts, within what a context could hold."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from phalanx.engine.sampling import SamplingParams
from phalanx.errors import RequestError
from phalanx.server.errors import bad_request
from phalanx.server.grammar.rules import TokenRules
from phalanx.server.protocol import CompletionRequest, EmbeddingsRequest, Message, Sampling, Texts

MOST_TOLD, MOST_NUMBERS = 2**18, 2**22
_PROBED = 8
_SURELY = 2


class Encoder:
    """Text to tokens. No work is done for text that cannot fit: it would cost much, and end in the same refusal."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._context = context
        self._most_characters = max(map(len, tokenizer.get_vocab()), default=1) * context

    def check_size(self, characters: int) -> None:
        """Even if every token were the longest there is."""
        if characters > self._most_characters:
            raise self._too_long(f"{characters} characters")

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Where text is long, its beginning is tried first: if that alone is twice what fits, the rest is not read."""
        self.check_size(len(text))
        probed = _PROBED * self._context
        if len(text) > probed:
            tokens = len(self._tokenizer.encode(text[:probed], add_special_tokens=False))
            if tokens > _SURELY * self._context:
                raise self._too_long(f"far more than {self._context} tokens")
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, tokens: Sequence[int], keep_special: bool = False) -> str:
        if len(tokens) > self._context:
            raise self._too_long(f"{len(tokens)} tokens")
        return self._tokenizer.decode(tokens, skip_special_tokens=not keep_special)

    def words(self, tokens: Sequence[int]) -> list[str]:
        """As the vocabulary has them."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def _too_long(self, found: str) -> RequestError:
        return RequestError(
            "prompt_too_long",
            f"The text has {found}; the context is {self._context} tokens.",
            "Shorten it, or raise max_model_len.",
        )


def token_rules(request: Sampling, encoder: Encoder, vocab: int) -> TokenRules | None:
    """What `allowed_token_ids` and `bad_words` come to. A word is meant at the start of a text and behind a space."""
    allowed = request.allowed_token_ids
    if allowed is None and not request.bad_words:
        return None
    if allowed is not None and max(allowed) >= vocab:
        raise bad_request(
            f"allowed_token_ids has {max(allowed)}; the vocabulary has {vocab}.", param="allowed_token_ids"
        )
    banned: list[list[int]] = []
    for word in request.bad_words or []:
        at_start, behind_space = (encoder.encode(before + word.lstrip(), False) for before in ("", " "))
        banned += [words for words in (at_start, behind_space) if words and words not in banned]
    return TokenRules(allowed, banned)


def check_told(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """What is told of prompts has a bound."""
    if params.prompt_logprobs is None:
        return
    numbers = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if numbers > MOST_TOLD:
        raise bad_request(
            f"Log-probabilities of these prompts are {numbers} numbers; {MOST_TOLD} are told at once. Ask for fewer of "
            "the likeliest, or send the prompts one by one.",
            param="prompt_logprobs",
        )


def characters_of(messages: Sequence[Message]) -> int:
    """Of the texts in messages: what is surely part of the prompt."""
    contents = (message.content or "" for message in messages)
    return sum(len(text) if isinstance(text, str) else sum(len(part.text) for part in text) for text in contents)


def prompts_of(request: CompletionRequest, encoder: Encoder) -> list[list[int]]:
    """The token ids of each prompt."""
    return _encoded(request.prompt, encoder, special_tokens=True)


def inputs_of(request: EmbeddingsRequest, encoder: Encoder, width: int) -> list[list[int]]:
    """The token ids of each text whose embedding is wanted, of so many numbers."""
    texts = len(request.input) if isinstance(request.input, list) and not isinstance(request.input[0], int) else 1
    if texts * width > MOST_NUMBERS:
        raise bad_request(
            f"{texts} embeddings of {width} numbers are more than the {MOST_NUMBERS} numbers that are sent at once: "
            f"ask for {MOST_NUMBERS // width} at a time.",
            param="input",
        )
    return _encoded(request.input, encoder, request.add_special_tokens)


def _encoded(given: Texts, encoder: Encoder, special_tokens: bool) -> list[list[int]]:
    if isinstance(given, str):
        return [encoder.encode(given, special_tokens)]
    if isinstance(given[0], int):
        return [list(given)]
    return [encoder.encode(each, special_tokens) if isinstance(each, str) else list(each) for each in given]


def echoes_of(request: CompletionRequest, prompts: list[list[int]], encoder: Encoder) -> list[str]:
    """What the answers to each prompt begin with: the prompt where it is echoed, else nothing."""
    if not request.echo:
        return [""] * len(prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = given if isinstance(given[0], str) else [encoder.decode(prompt) for prompt in prompts]
    return [str(text) for text in texts]
