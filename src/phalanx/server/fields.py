"""What the fields of requests are made of: texts, numbers and lists within bounds, and the body that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from phalanx.engine.sampling import COUNT_LIMIT, MAX_LOGIT_BIAS

MAX_MESSAGES = 2048
MAX_PROMPTS = 128
MAX_INPUTS = 2048
MAX_TOKENS = 2**20
MAX_TOOLS = 128
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 128
MAX_TEMPLATE_SWITCHES = 16
MAX_UNKNOWN_FIELDS = 256
MAX_OBJECT_PARTS = 16_384


def _clean(text: str) -> str:
    """Text that every part of the way can carry. Half a surrogate pair is no JSON and does not come here."""
    if "\x00" in text:
        raise ValueError("it holds a NUL character")
    return text


def _of_bounded_size(value: Any) -> Any:
    """An object of any form, with so many members and items in all."""
    parts, left = 0, [value]
    while left:
        part = left.pop()
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        parts += len(inner)
        if parts > MAX_OBJECT_PARTS:
            raise ValueError(f"it has more than {MAX_OBJECT_PARTS} members and items")
        left += inner
    return value


def _biases(bias: dict[str, Any]) -> dict[str, Any]:
    for key, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ValueError(f"the bias of {key[:40]!r} is no number from -100 to 100")
    return bias


Text = Annotated[str, AfterValidator(_clean)]
Object = Annotated[dict[str, Any], AfterValidator(_of_bounded_size)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_clean)]
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_clean)]
TokenId = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
Count = Annotated[int, Field(ge=1, le=COUNT_LIMIT)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[dict[str, Any], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_biases)]
Tokens = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class Body(BaseModel):
    """Types are taken as they are written: no number in quotes, no 1 for true. Unknown fields are kept to be named.

    Every list and map has a bound, and the first wrong item of a list ends its check.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="after")
    def _few_unknown_fields(self) -> Self:
        if len(self.model_extra or {}) > MAX_UNKNOWN_FIELDS:
            raise ValueError(f"there are more than {MAX_UNKNOWN_FIELDS} unknown fields")
        return self

    def unknown_fields(self, path: str = "") -> Iterator[str]:
        """Names of fields nobody reads, as `messages.0.colour`."""
        for name in self.model_extra or {}:
            yield path + name
        for name in self.model_fields_set:
            value = getattr(self, name, None)
            for index, item in enumerate(value) if isinstance(value, list) else [("", value)]:
                if isinstance(item, Body):
                    yield from item.unknown_fields(f"{path}{name}.{index}.".replace("..", "."))
