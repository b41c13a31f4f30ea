"""From a request's fields to the form its answer must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phalanx.server.errors import bad_request
from phalanx.server.grammar.constraint import Constraint
from phalanx.server.grammar.tools import tools_constraint
from phalanx.server.offer import Offer
from phalanx.server.protocol import Constrained, ResponseFormat, StructuredOutputs


def constraint_of(request: Constrained, offer: Offer, tool_parser: str | None) -> Constraint | None:
    """At most one form: two descriptions of the same answer could contradict each other. It is that of an answer which
    is no call of a tool.
    """
    forms = [
        *_of_response_format(request.response_format or ResponseFormat(type="text")),
        *_of_structured_outputs(request.structured_outputs or StructuredOutputs()),
        *_of_other_names(request),
    ]
    if len(forms) > 1:
        raise bad_request(
            "The form of the answer is described more than once: use one of response_format and the fields of "
            "structured_outputs."
        )
    form = forms[0] if forms else None
    if not offer.tools or not (form or offer.must):
        return form
    assert tool_parser is not None
    tool_format = "qwen3_xml" if tool_parser == "qwen3_coder" else tool_parser
    tools = [{"name": tool.function.name, "parameters": tool.function.parameters} for tool in offer.tools]
    return tools_constraint(tools, "required", tool_format, not offer.one, or_form=None if offer.must else form)


def _of_response_format(wanted: ResponseFormat) -> Iterator[Constraint]:
    if wanted.type == "json_object":
        yield Constraint("json_object")
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise bad_request("response_format of type json_schema needs json_schema.", param="response_format")
        yield Constraint("json_schema", _dumped(wanted.json_schema.schema_))
    elif wanted.type == "structural_tag":
        if wanted.format is None:
            raise bad_request("response_format of type structural_tag needs format.", param="response_format")
        yield Constraint("structural_tag", _dumped({"format": wanted.format}))


def _of_structured_outputs(wanted: StructuredOutputs) -> Iterator[Constraint]:
    if wanted.json_ is not None:
        yield Constraint("json_schema", wanted.json_ if isinstance(wanted.json_, str) else _dumped(wanted.json_))
    if wanted.regex is not None:
        yield Constraint("regex", wanted.regex)
    if wanted.choice is not None:
        yield Constraint("choice", _dumped(wanted.choice))
    if wanted.grammar is not None:
        yield Constraint("grammar", wanted.grammar)
    if wanted.structural_tag is not None:
        yield Constraint("structural_tag", wanted.structural_tag)


def _of_other_names(request: Constrained) -> Iterator[Constraint]:
    """What vLLM once called `guided_*`, SGLang `regex` and `ebnf`, and llama.cpp `grammar`."""
    old = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    yield from _of_structured_outputs(old)
    yield from _of_structured_outputs(StructuredOutputs(regex=request.regex, grammar=request.ebnf))
    yield from _of_structured_outputs(StructuredOutputs(grammar=request.grammar))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
