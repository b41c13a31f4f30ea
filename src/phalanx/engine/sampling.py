"""SamplingParams: what a request asks of the sampler, checked when it is made."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.errors import RequestError
from phalanx.spec.pooling import POOLINGS

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 256
COUNT_LIMIT = 2**31
SEED_LIMIT = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Defaults sample from the model's own distribution.

    `temperature=0` is greedy. `top_k=0` keeps all tokens. `max_tokens=None` generates to the end of the context.
    `logprobs=k` returns log-probabilities of the chosen token and the k likeliest, before penalties and temperature;
    `prompt_logprobs=k` the same of the prompt's own tokens. `max_tokens=0` computes the prompt alone; only then may
    `pooling` ask for its embedding: "mean" is the mean of all tokens' last hidden states, "last" that of the last one.
    Repetition penalty looks at prompt and output, presence and frequency penalty at the output alone. Requests of a
    lower `priority` number are served first; it changes when tokens come, never which.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_CHOICES)
        _whole("max_tokens", self.max_tokens, 0, COUNT_LIMIT, optional=True)
        _whole("min_tokens", self.min_tokens, 0, COUNT_LIMIT if self.max_tokens is None else self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, COUNT_LIMIT)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _whole("priority", self.priority, -COUNT_LIMIT, COUNT_LIMIT)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1, optional=True)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _pooling(self.pooling, self.max_tokens)
        _of_type("ignore_eos", self.ignore_eos, bool)
        _of_type("logit_bias", self.logit_bias, dict)
        _of_type("stop", self.stop, list)
        _of_type("stop_token_ids", self.stop_token_ids, list)
        _whole("stop_token_ids entries", len(self.stop_token_ids), 0, MAX_STOP_TOKENS)
        _whole("logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _whole("stop strings", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            _stop_string(text)

    def of_choice(self, index: int) -> SamplingParams:
        """The parameters of one of the `n` answers: each has a seed of its own."""
        seed = self.seed if self.seed is None or index == 0 else (self.seed + index) % SEED_LIMIT
        return msgspec.structs.replace(self, n=1, seed=seed)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_into_prompt(self) -> bool:
        """Whether it asks for more of the prompt than the token behind it."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @property
    def reports(self) -> bool:
        """Whether its first output is not just a token."""
        return self.looks_into_prompt or self.max_tokens == 0


def _of_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError("bad_parameter", f"{name} is {value!r}.", f"It must be a {kind.__name__}.")


def _pooling(pooling: Any, max_tokens: int | None) -> None:
    if pooling not in (None, *POOLINGS):
        raise RequestError("bad_parameter", f"pooling is {pooling!r}.", f"Use one of {', '.join(POOLINGS)}.")
    if pooling is not None and max_tokens != 0:
        raise RequestError("bad_parameter", "pooling asks for an embedding, not for tokens.", "Set max_tokens to 0.")


def _stop_string(text: Any) -> None:
    if not isinstance(text, str) or not text:
        found = repr(text) if text != "" else "an empty string"
        raise RequestError("bad_parameter", f"stop holds {found}.", "Give strings of one character or more.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("bad_parameter", f"stop holds {text!r}, half a character.", "Give whole characters.")


def _whole(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("bad_parameter", f"{name} is {value!r}.", "It must be a whole number.")
    if not low <= value <= high:
        raise RequestError("bad_parameter", f"{name} is {_shown(value)}.", f"It must be from {low} to {high}.")


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError("bad_parameter", f"{name} is {value!r}.", "It must be a number.")
    if not low <= value <= high or (open_low and value == low):
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError("bad_parameter", f"{name} is {_shown(value)}.", f"It must be {bounds}.")


def _shown(value: float) -> str:
    """A number as text; one too long to read is named by its size."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return str(value)
